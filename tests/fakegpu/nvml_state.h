/* What a test can set of each GPU. Names are those of the control file. */
#ifndef FAKEGPU_NVML_STATE_H
#define FAKEGPU_NVML_STATE_H

enum { MAX_XIDS = 16 };

struct gpu_state {
    unsigned long long temperature_c, memory_temperature_c, power_w;
    unsigned long long clock_mhz, memory_clock_mhz;
    unsigned long long utilization_percent, memory_used_mib;
    unsigned long long throttle_reasons; /* bits nvmlClocksEventReason... */
    unsigned long long pcie_width, pcie_generation, pcie_replays;
    unsigned long long ecc_corrected, ecc_uncorrected;
    unsigned long long rows_remapped, rows_pending, rows_failed;
    unsigned long long links;                       /* one bit for each NVLink that is up */
    unsigned long long link_errors;                 /* of each kind, on each link */
    unsigned long long fabric_state, fabric_status; /* nvmlGpuFabricState_t, nvmlReturn_t */
    unsigned long long fabric_health;               /* bits of nvmlGpuFabricInfo_v2_t.healthMask */
    unsigned long long recovery_action;             /* nvmlDeviceGpuRecoveryAction_t */
    unsigned long long lost; /* not 0: each query answers NVML_ERROR_GPU_IS_LOST */
    unsigned xids[MAX_XIDS]; /* events so far */
    int xid_count;
};

/* As the control file has it now. */
struct gpu_state gpu_state(int gpu);

#endif

/* NVML: which GPUs there are, and their state (nvml_state.c). NVML knows nothing of CUDA's visible
 * devices nor of contexts: a process that only watches GPUs uses this file alone. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include "fakegpu.h"
#include "nvml_state.h"

#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LINKS = 18, WATTS = 1000, MIB = 1 << 20 };

static atomic_int starts;
static struct nvmlDevice_st {
    char unused;
} handles[MAX_DEVICES];

static int gpu_of(nvmlDevice_t device) { return (int)(device - handles); }

/* Each function begins with one of these: rules, whether NVML is started, whether the GPU is lost.
 */
#define ENTER_NVML()                                                                               \
    do {                                                                                           \
        static struct point point = {.name = __func__};                                            \
        nvmlReturn_t entered = (nvmlReturn_t)rules_suffer(&point, -1, NULL);                       \
        if (entered != NVML_SUCCESS) return entered;                                               \
        if (atomic_load(&starts) == 0) return NVML_ERROR_UNINITIALIZED;                            \
    } while (0)

#define ENTER_GPU(device, state)                                                                   \
    ENTER_NVML();                                                                                  \
    if ((device) == NULL) return NVML_ERROR_INVALID_ARGUMENT;                                      \
    struct gpu_state state = gpu_state(gpu_of(device));                                            \
    if (state.lost) return NVML_ERROR_GPU_IS_LOST

/* --- start and end, and what concerns all GPUs ------------------------------------------------ */

#define START()                                                                                    \
    do {                                                                                           \
        static struct point point = {.name = __func__};                                            \
        nvmlReturn_t entered = (nvmlReturn_t)rules_suffer(&point, -1, NULL);                       \
        if (entered == NVML_SUCCESS) atomic_fetch_add(&starts, 1);                                 \
        return entered;                                                                            \
    } while (0)

API nvmlReturn_t nvmlInit_v2(void) { START(); }

API nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    START();
}

API nvmlReturn_t nvmlShutdown(void) {
    ENTER_NVML();
    atomic_fetch_sub(&starts, 1);
    return NVML_SUCCESS;
}

API const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case NVML_SUCCESS: return "The operation was successful";
    case NVML_ERROR_UNINITIALIZED: return "NVML was not first initialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "A supplied argument is invalid";
    case NVML_ERROR_NOT_SUPPORTED:
        return "The requested operation is not available on target device";
    case NVML_ERROR_NO_PERMISSION: return "The current user does not have permission";
    case NVML_ERROR_NOT_FOUND: return "A query to find an object was unsuccessful";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "An input argument is not large enough";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "NVIDIA driver is not loaded";
    case NVML_ERROR_TIMEOUT: return "User provided timeout passed";
    case NVML_ERROR_GPU_IS_LOST: return "The GPU has fallen off the bus";
    case NVML_ERROR_RESET_REQUIRED: return "The GPU requires a reset before it can be used again";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "RM has detected an NVML/RM version mismatch";
    default: return "An internal driver error occurred";
    }
}

static nvmlReturn_t put(char *text, unsigned length, const char *value) {
    if (length <= strlen(value)) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(text, value);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER_NVML();
    return put(version, length, "580.95.05"); /* the driver that came with CUDA 13.0 */
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    ENTER_NVML();
    return put(version, length, "13.580.95.05");
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER_NVML();
    *version = CUDART_VERSION;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

/* --- GPUs, by number, UUID and bus ------------------------------------------------------------ */

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER_NVML();
    *count = (unsigned)settings()->devices;
    return NVML_SUCCESS;
}

static nvmlReturn_t handle_of(int gpu, nvmlDevice_t *device) {
    if (gpu < 0 || gpu >= settings()->devices) return NVML_ERROR_NOT_FOUND;
    if (gpu_state(gpu).lost) return NVML_ERROR_GPU_IS_LOST;
    *device = &handles[gpu];
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    ENTER_NVML();
    nvmlReturn_t found = handle_of((int)index, device);
    return found == NVML_ERROR_NOT_FOUND ? NVML_ERROR_INVALID_ARGUMENT : found;
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER_NVML();
    char text[sizeof "GPU-" + 36];
    int gpu = settings()->devices - 1;
    for (; gpu >= 0; gpu--) {
        gpu_uuid(gpu, text);
        if (strcmp(text, uuid) == 0) break;
    }
    return handle_of(gpu, device);
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    ENTER_NVML();
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2) return NVML_ERROR_INVALID_ARGUMENT;
    int gpu = settings()->devices - 1;
    while (gpu >= 0 && gpu_pci_bus(gpu) != (int)bus) gpu--;
    return handle_of(gpu, device);
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    ENTER_GPU(device, state);
    *index = (unsigned)gpu_of(device);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *number) {
    return nvmlDeviceGetIndex(device, number);
}

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    ENTER_GPU(device, state);
    return put(name, length, "NVIDIA H200");
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    ENTER_GPU(device, state);
    char text[sizeof "GPU-" + 36];
    gpu_uuid(gpu_of(device), text);
    return put(uuid, length, text);
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    ENTER_GPU(device, state);
    unsigned bus = (unsigned)gpu_pci_bus(gpu_of(device));
    *info = (nvmlPciInfo_t){.bus = bus, .pciDeviceId = 0x233510de};
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", bus);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", bus);
    return NVML_SUCCESS;
}

/* --- memory, load, temperature, clocks -------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER_GPU(device, state);
    memory->total = settings()->memory_bytes;
    memory->used = state.memory_used_mib * MIB;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    ENTER_GPU(device, state);
    rates->gpu = (unsigned)state.utilization_percent;
    rates->memory = 0;
    return NVML_SUCCESS;
}

/* None, as inside a container, where those of others cannot be seen. torch asks by the oldest name
 * when memory runs out, pynvml by the newest. */
static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned *count) {
    ENTER_GPU(device, state);
    *count = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                      nvmlProcessInfo_v1_t *processes) {
    (void)processes;
    return no_processes(device, count);
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                         nvmlProcessInfo_t *processes) {
    (void)processes;
    return no_processes(device, count);
}

API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                          unsigned *celsius) {
    ENTER_GPU(device, state);
    if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    *celsius = (unsigned)state.temperature_c;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) {
    ENTER_GPU(device, state);
    *milliwatts = (unsigned)state.power_w * WATTS;
    return NVML_SUCCESS;
}

static nvmlReturn_t put_clock(nvmlClockType_t type, unsigned long long core,
                              unsigned long long memory, unsigned *mhz) {
    *mhz = (unsigned)(type == NVML_CLOCK_MEM ? memory : core);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *mhz) {
    ENTER_GPU(device, state);
    return put_clock(type, state.clock_mhz, state.memory_clock_mhz, mhz);
}

API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type,
                                           unsigned *mhz) {
    ENTER_GPU(device, state);
    return put_clock(type, 1980, 3201, mhz);
}

API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device,
                                                        unsigned long long *reasons) {
    ENTER_GPU(device, state);
    *reasons = state.throttle_reasons;
    return NVML_SUCCESS;
}

/* Its name until driver 535. */
API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device,
                                                           unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

/* --- PCIe ------------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *lanes) {
    ENTER_GPU(device, state);
    *lanes = (unsigned)state.pcie_width;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *lanes) {
    ENTER_GPU(device, state);
    *lanes = 16;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
    ENTER_GPU(device, state);
    *generation = (unsigned)state.pcie_generation;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *generation) {
    ENTER_GPU(device, state);
    *generation = 5;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned *replays) {
    ENTER_GPU(device, state);
    *replays = (unsigned)state.pcie_replays;
    return NVML_SUCCESS;
}

/* --- errors of memory ------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current,
                                      nvmlEnableState_t *pending) {
    ENTER_GPU(device, state);
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t since,
                                             unsigned long long *errors) {
    ENTER_GPU(device, state);
    (void)since; /* the same since the start of the driver and for the GPU's life */
    *errors =
        type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? state.ecc_corrected : state.ecc_uncorrected;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected,
                                           unsigned *uncorrected, unsigned *pending,
                                           unsigned *failed) {
    ENTER_GPU(device, state);
    *corrected = 0;
    *uncorrected = (unsigned)state.rows_remapped;
    *pending = (unsigned)state.rows_pending;
    *failed = (unsigned)state.rows_failed;
    return NVML_SUCCESS;
}

/* --- NVLink and fabric ------------------------------------------------------------------------ */

API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link,
                                          nvmlEnableState_t *active) {
    ENTER_GPU(device, state);
    if (link >= NVML_NVLINK_MAX_LINKS) return NVML_ERROR_INVALID_ARGUMENT;
    if (link >= LINKS) return NVML_ERROR_NOT_SUPPORTED;
    *active = state.links >> link & 1 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link,
                                                 nvmlNvLinkErrorCounter_t counter,
                                                 unsigned long long *errors) {
    ENTER_GPU(device, state);
    (void)counter;
    if (link >= LINKS) return NVML_ERROR_INVALID_ARGUMENT;
    *errors = state.link_errors;
    return NVML_SUCCESS;
}

/* All links of an HGX board lead to its switches. */
API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link,
                                                     nvmlIntNvLinkDeviceType_t *type) {
    ENTER_GPU(device, state);
    if (link >= LINKS) return NVML_ERROR_INVALID_ARGUMENT;
    *type = NVML_NVLINK_DEVICE_TYPE_SWITCH;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t peer,
                                        nvmlGpuP2PCapsIndex_t capability,
                                        nvmlGpuP2PStatus_t *status) {
    ENTER_GPU(device, state);
    (void)peer, (void)capability;
    *status = NVML_P2P_STATUS_OK;
    return NVML_SUCCESS;
}

/* Version 3 has version 2 as its beginning, but for the summary at its end. */
API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info) {
    ENTER_GPU(device, state);
    if (info->version != nvmlGpuFabricInfo_v2 && info->version != nvmlGpuFabricInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memset(info->clusterUuid, 0, sizeof info->clusterUuid); /* no fabric beyond the board */
    info->status = (nvmlReturn_t)state.fabric_status;
    info->cliqueId = 0;
    info->state = (nvmlGpuFabricState_t)state.fabric_state;
    info->healthMask = (unsigned)state.fabric_health;
    if (info->version == nvmlGpuFabricInfo_v3)
        info->healthSummary = state.fabric_health == 0 ? NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY
                                                       : NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    ENTER_GPU(device, state);
    memset(info, 0, sizeof *info);
    info->status = (nvmlReturn_t)state.fabric_status;
    info->state = (nvmlGpuFabricState_t)state.fabric_state;
    return NVML_SUCCESS;
}

/* --- fields ----------------------------------------------------------------------------------- */

static bool field_of(const struct gpu_state *state, unsigned field, unsigned long long *value) {
    switch (field) {
    case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: *value = state->recovery_action; break;
    case NVML_FI_DEV_MEMORY_TEMP: *value = state->memory_temperature_c; break;
    case NVML_FI_DEV_NVLINK_LINK_COUNT: *value = LINKS; break;
    case NVML_FI_DEV_ECC_SBE_VOL_TOTAL:
    case NVML_FI_DEV_ECC_SBE_AGG_TOTAL: *value = state->ecc_corrected; break;
    case NVML_FI_DEV_ECC_DBE_VOL_TOTAL:
    case NVML_FI_DEV_ECC_DBE_AGG_TOTAL: *value = state->ecc_uncorrected; break;
    case NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL:
    case NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL:
    case NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL:
    case NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: *value = state->link_errors * LINKS; break;
    case NVML_FI_DEV_PCIE_REPLAY_COUNTER: *value = state->pcie_replays; break;
    default: return false;
    }
    return true;
}

API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                          nvmlFieldValue_t *values) {
    ENTER_GPU(device, state);
    for (int i = 0; i < count; i++) {
        unsigned long long value = 0;
        bool is_known = field_of(&state, values[i].fieldId, &value);
        values[i].nvmlReturn = is_known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        values[i].value.ullVal = value;
    }
    return NVML_SUCCESS;
}

/* --- events: Xid errors ----------------------------------------------------------------------- */

struct nvmlEventSet_st {
    bool registered[MAX_DEVICES];
    int delivered[MAX_DEVICES]; /* how many of the GPU's Xid errors */
};

API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    ENTER_GPU(device, state);
    *types = nvmlEventTypeXidCriticalError;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER_NVML();
    *set = calloc(1, sizeof **set);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    ENTER_NVML();
    free(set);
    return NVML_SUCCESS;
}

/* Events before that are not delivered. */
API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                          nvmlEventSet_t set) {
    ENTER_GPU(device, state);
    if (types & ~nvmlEventTypeXidCriticalError) return NVML_ERROR_NOT_SUPPORTED;
    set->registered[gpu_of(device)] = true;
    set->delivered[gpu_of(device)] = state.xid_count;
    return NVML_SUCCESS;
}

static bool next_event(nvmlEventSet_t set, nvmlEventData_t *event) {
    for (int gpu = 0; gpu < settings()->devices; gpu++) {
        struct gpu_state state = gpu_state(gpu);
        if (state.xid_count < set->delivered[gpu]) set->delivered[gpu] = state.xid_count;
        if (!set->registered[gpu] || state.xid_count == set->delivered[gpu]) continue;
        *event = (nvmlEventData_t){
            .device = &handles[gpu],
            .eventType = nvmlEventTypeXidCriticalError,
            .eventData = state.xids[set->delivered[gpu]++],
            .gpuInstanceId = 0xffffffff,
            .computeInstanceId = 0xffffffff,
        };
        return true;
    }
    return false;
}

API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *event,
                                     unsigned timeout_ms) {
    ENTER_NVML();
    double until = seconds_now() + timeout_ms / 1e3;
    while (!next_event(set, event)) {
        if (seconds_now() >= until) return NVML_ERROR_TIMEOUT;
        /* The file may be on a file system that announces no changes. */
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return NVML_SUCCESS;
}

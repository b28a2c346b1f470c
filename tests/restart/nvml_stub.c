/* A stand-in for libnvidia-ml.so.1 on machines without a GPU: devices whose state is read
 * from environment variables at every call, so that a test can change it between two checks.
 *
 *   NVML_STUB_COUNT     how many devices there are, up to 16; unset: 4
 *   NVML_STUB_INIT      return code of nvmlInit (9: driver not loaded)
 *   NVML_STUB_LOST      return code of every query of a device (15: GPU is lost)
 *   NVML_STUB_RECOVERY  recovery action; unset: the field is not supported
 *   NVML_STUB_REMAP     1: a row remapping failed; unset: not supported
 *   NVML_STUB_LINKS     one character per NVLink: 1 active, 0 inactive, - not there
 *   NVML_STUB_HANG      set: field queries never return
 *   NVML_STUB_BUSY      utilization in percent; unset, like each of those below: not supported
 *   NVML_STUB_REASONS   why clocks are lowered (bits), by the name up to driver 535 only
 *   NVML_STUB_CLOCK, NVML_STUB_CLOCK_MAX, NVML_STUB_PCIE, NVML_STUB_PCIE_MAX   MHz, lanes
 *   NVML_STUB_ECC       ECC errors
 *   NVML_STUB_USED_GIB  memory in use; on device i that much more than on device 0
 */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

/* The layouts of nvml.h. */
struct field { unsigned id, scope; long long timestamp, latency; int type, ret; unsigned long long value; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int handles[16];

static unsigned count(void) { return (unsigned)number("NVML_STUB_COUNT", 4); }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return number("NVML_STUB_INIT", SUCCESS); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "stub error"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= count()) return INVALID_ARGUMENT;
    *device = &handles[index];
    return number("NVML_STUB_LOST", SUCCESS);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strncmp(uuid, "GPU-stub-", 9) != 0) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2((unsigned)atoi(uuid + 9), device);
}

int nvmlDeviceGetCount_v2(unsigned *found) {
    *found = count();
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    (void)device;
    snprintf(name, length, "NVIDIA Stub");
    return number("NVML_STUB_LOST", SUCCESS);
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-stub-%d", (int)((int *)device - handles));
    return number("NVML_STUB_LOST", SUCCESS);
}

/* What a variable says, where it is set. */
static int value_of(const char *name, unsigned *value) {
    if (!getenv(name)) return NOT_SUPPORTED;
    *value = (unsigned)number(name, 0);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *gpu_and_memory) {
    (void)device;
    gpu_and_memory[1] = 0;
    return value_of("NVML_STUB_BUSY", gpu_and_memory);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    unsigned bits = 0;
    (void)device;
    int code = value_of("NVML_STUB_REASONS", &bits);
    *reasons = bits;
    return code;
}

int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) {
    (void)device, (void)kind;
    return value_of("NVML_STUB_CLOCK", mhz);
}

int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz) {
    (void)device, (void)kind;
    return value_of("NVML_STUB_CLOCK_MAX", mhz);
}

int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *lanes) {
    (void)device;
    return value_of("NVML_STUB_PCIE", lanes);
}

int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) {
    (void)device;
    return value_of("NVML_STUB_PCIE_MAX", lanes);
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int since, unsigned long long *errors) {
    unsigned count = 0;
    (void)device, (void)kind, (void)since;
    int code = value_of("NVML_STUB_ECC", &count);
    *errors = count;
    return code;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used) {
    unsigned gib = 0;
    int code = value_of("NVML_STUB_USED_GIB", &gib);
    total_free_used[2] = (unsigned long long)(gib + (unsigned)((int *)device - handles)) << 30;
    return code;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "570.86");
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0",
             0x1a + 0x10 * (unsigned)((int *)device - handles));
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(void *device, int count, struct field *fields) {
    (void)device;
    while (getenv("NVML_STUB_HANG")) pause();
    for (int i = 0; i < count; i++) {
        fields[i].ret = getenv("NVML_STUB_RECOVERY") ? SUCCESS : NOT_SUPPORTED;
        fields[i].value = (unsigned)number("NVML_STUB_RECOVERY", 0);
    }
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corr, unsigned *unc, unsigned *pending,
                              unsigned *failure) {
    (void)device;
    if (!getenv("NVML_STUB_REMAP")) return NOT_SUPPORTED;
    *corr = *unc = *pending = 0;
    *failure = (unsigned)number("NVML_STUB_REMAP", 0);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
    const char *links = getenv("NVML_STUB_LINKS");
    (void)device;
    if (!links || link >= strlen(links)) return INVALID_ARGUMENT;
    if (links[link] == '-') return NOT_SUPPORTED;
    *active = links[link] == '1';
    return SUCCESS;
}

/* Devices: which there are, the current one of a thread, their lock, the errors of CUDA. */
#include "fakegpu.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static atomic_int sticky;
static atomic_bool used; /* the process has called CUDA: its children may not */
static atomic_bool has_context[MAX_DEVICES];
static __thread int current;
static __thread cudaError_t last;

static void prepare_condition(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
}

static void refuse_children(void) {
    pthread_mutex_init(&lock, NULL);
    prepare_condition();
    if (atomic_load(&used)) atomic_store(&sticky, cudaErrorInitializationError);
}

__attribute__((constructor)) static void prepare(void) {
    prepare_condition();
    pthread_atfork(NULL, NULL, refuse_children);
}

/* --- lock ------------------------------------------------------------------------------------- */

void device_lock(void) { pthread_mutex_lock(&lock); }

void device_unlock(void) { pthread_mutex_unlock(&lock); }

void device_changed(void) { pthread_cond_broadcast(&changed); }

void device_wait(double timeout_s) {
    if (timeout_s < 0) {
        pthread_cond_wait(&changed, &lock);
        return;
    }
    double until = seconds_now() + timeout_s, whole = floor(until);
    struct timespec at = {.tv_sec = (time_t)whole, .tv_nsec = (long)((until - whole) * 1e9)};
    pthread_cond_timedwait(&changed, &lock, &at);
}

/* --- errors ----------------------------------------------------------------------------------- */

/* After these a context is of no use any more, as CUDA's own list of errors says. */
static bool corrupts(cudaError_t error) {
    switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorUnknown: return true;
    default: return false;
    }
}

cudaError_t device_sticky(void) { return (cudaError_t)atomic_load(&sticky); }

void device_corrupt(cudaError_t error) {
    int none = cudaSuccess;
    if (!atomic_compare_exchange_strong(&sticky, &none, (int)error)) return;
    log_event("context-corrupted", "error=%s", cudaGetErrorName(error));
    streams_drop();
    device_changed();
}

cudaError_t device_error(cudaError_t error) {
    if (error != cudaSuccess) last = error;
    return error;
}

cudaError_t device_enter(struct point *point, bool uses_context) {
    atomic_store(&used, true);
    if (uses_context && device_sticky() != cudaSuccess) return device_sticky();
    cudaError_t error = (cudaError_t)rules_suffer(point, -1, NULL);
    if (corrupts(error)) {
        device_lock();
        device_corrupt(error);
        device_unlock();
    }
    return error;
}

API cudaError_t cudaPeekAtLastError(void) {
    return device_sticky() != cudaSuccess ? device_sticky() : last;
}

API cudaError_t cudaGetLastError(void) {
    cudaError_t error = cudaPeekAtLastError();
    last = cudaSuccess;
    return error;
}

/* --- which devices there are ------------------------------------------------------------------ */

/* The GPU that an entry of CUDA_VISIBLE_DEVICES names: a number or a UUID; -1 for none. */
static int gpu_of_entry(const char *entry) {
    char *end, uuid[sizeof "GPU-" + 36];
    long number = strtol(entry, &end, 10);
    if (end != entry && *end == '\0')
        return number >= 0 && number < settings()->devices ? (int)number : -1;
    for (int gpu = 0; gpu < settings()->devices; gpu++) {
        gpu_uuid(gpu, uuid);
        if (strlen(entry) > strlen("GPU-") && strncmp(uuid, entry, strlen(entry)) == 0) return gpu;
    }
    return -1;
}

/* The list ends at the first entry that is no device, as CUDA has it. Returns its length. */
static int visible(int gpus[MAX_DEVICES]) {
    int count = 0;
    if (settings()->visible_devices == NULL) {
        for (; count < settings()->devices; count++) gpus[count] = count;
        return count;
    }
    char *list = strdup(settings()->visible_devices), *rest = NULL;
    for (char *entry = strtok_r(list, ", ", &rest); entry != NULL && count < MAX_DEVICES;
         entry = strtok_r(NULL, ", ", &rest)) {
        int gpu = gpu_of_entry(entry);
        if (gpu < 0) break;
        gpus[count++] = gpu;
    }
    free(list);
    return count;
}

int device_count(void) {
    int gpus[MAX_DEVICES];
    return visible(gpus);
}

int device_gpu(int device) {
    int gpus[MAX_DEVICES];
    return device >= 0 && device < visible(gpus) ? gpus[device] : -1;
}

/* "fakegpu" in ASCII, and the number of the GPU: no vendor's UUID looks like it. */
void gpu_uuid_bytes(int gpu, unsigned char bytes[16]) {
    memset(bytes, 0, 16);
    memcpy(bytes, "fakegpu", 7);
    bytes[15] = (unsigned char)gpu;
}

void gpu_uuid(int gpu, char *text) {
    unsigned char b[16];
    gpu_uuid_bytes(gpu, b);
    sprintf(text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
            b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
            b[15]);
}

int gpu_pci_bus(int gpu) { return gpu + 1; }

int device_current(void) { return current; }

bool device_has_context(int device) { return atomic_load(&has_context[device]); }

API cudaError_t cudaGetDeviceCount(int *count) {
    ENTER_QUERY();
    *count = device_count();
    return *count > 0 ? cudaSuccess : device_error(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int *device) {
    ENTER_QUERY();
    *device = current;
    return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
    ENTER_QUERY();
    if (device < 0 || device >= device_count()) return device_error(cudaErrorInvalidDevice);
    current = device;
    atomic_store(&has_context[device], true);
    return cudaSuccess;
}

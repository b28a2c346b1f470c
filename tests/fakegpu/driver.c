/* Functions of the driver that torch looks up by name, and how it looks them up. */
#include "fakegpu.h"

#include <string.h>

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function,
                                                 unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
    ENTER_QUERY();
    (void)version, (void)flags;
    *function = own_symbol(name);
    if (result != NULL)
        *result =
            *function != NULL ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                        enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}

API CUresult cuInit(unsigned flags) {
    ENTER_DRIVER_QUERY();
    (void)flags;
    return device_count() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count) {
    ENTER_DRIVER_QUERY();
    *count = device_count();
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER_DRIVER_QUERY();
    if (device_gpu(ordinal) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

/* The attributes have the numbers of the runtime's. */
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
    default: return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
    }
    return CUDA_SUCCESS;
}

#if CUDA_VERSION >= 12090
/* The driver has nothing to say. */
API CUresult cuLogsRegisterCallback(CUlogsCallback function, void *data,
                                    CUlogsCallbackHandle *callback) {
    (void)function, (void)data;
    if (callback != NULL) *callback = NULL;
    return CUDA_SUCCESS;
}
#endif

#undef cuDeviceGetUuid
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER_DRIVER_QUERY();
    if (device_gpu(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    gpu_uuid_bytes(device_gpu(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

/* --- contexts: each device has its primary one, whose handle is made of the device's number --- */

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x1000 + device); }

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER_DRIVER_QUERY();
    if (device_gpu(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = device_has_context(device);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER_DRIVER_QUERY();
    if (device_gpu(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER_DRIVER_QUERY();
    int device = device_current();
    *context = device_has_context(device) ? context_of(device) : NULL;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER_DRIVER_QUERY();
    if (context == NULL) return CUDA_SUCCESS;
    return (CUresult)cudaSetDevice((int)((uintptr_t)context - 0x1000));
}

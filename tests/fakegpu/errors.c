/* Errors of CUDA, NCCL and NVML by name: for rules, and for messages that torch prints. */
#include "fakegpu.h"

#include <cuda.h>
#include <nvml.h>
#include <string.h>
#include <strings.h>

struct error {
    int number;
    const char *name, *text;
};

/* Texts are CUDA's: signatures of logs look for them. */
static const struct error cuda_errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorNvlinkUncorrectable, "cudaErrorNvlinkUncorrectable",
     "uncorrectable NVLink error detected during the execution"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorHardwareStackError, "cudaErrorHardwareStackError", "hardware stack error"},
    {cudaErrorIllegalInstruction, "cudaErrorIllegalInstruction",
     "an illegal instruction was encountered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorSystemNotReady, "cudaErrorSystemNotReady", "system not yet initialized"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

static const struct error other_errors[] = {
    {1, "ncclUnhandledCudaError", ""},
    {2, "ncclSystemError", ""},
    {3, "ncclInternalError", ""},
    {4, "ncclInvalidArgument", ""},
    {5, "ncclInvalidUsage", ""},
    {6, "ncclRemoteError", ""},
    {NVML_ERROR_UNINITIALIZED, "NVML_ERROR_UNINITIALIZED", ""},
    {NVML_ERROR_NOT_SUPPORTED, "NVML_ERROR_NOT_SUPPORTED", ""},
    {NVML_ERROR_NO_PERMISSION, "NVML_ERROR_NO_PERMISSION", ""},
    {NVML_ERROR_DRIVER_NOT_LOADED, "NVML_ERROR_DRIVER_NOT_LOADED", ""},
    {NVML_ERROR_TIMEOUT, "NVML_ERROR_TIMEOUT", ""},
    {NVML_ERROR_GPU_IS_LOST, "NVML_ERROR_GPU_IS_LOST", ""},
    {NVML_ERROR_RESET_REQUIRED, "NVML_ERROR_RESET_REQUIRED", ""},
    {NVML_ERROR_LIB_RM_VERSION_MISMATCH, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", ""},
    {NVML_ERROR_UNKNOWN, "NVML_ERROR_UNKNOWN", ""},
};

enum {
    CUDA_ERRORS = sizeof cuda_errors / sizeof *cuda_errors,
    OTHER_ERRORS = sizeof other_errors / sizeof *other_errors,
};

int error_number(const char *name) {
    for (int i = 0; i < CUDA_ERRORS; i++)
        if (strcasecmp(cuda_errors[i].name, name) == 0) return cuda_errors[i].number;
    for (int i = 0; i < OTHER_ERRORS; i++)
        if (strcasecmp(other_errors[i].name, name) == 0) return other_errors[i].number;
    return -1;
}

static const struct error *find(int number) {
    for (int i = 0; i < CUDA_ERRORS; i++)
        if (cuda_errors[i].number == number) return &cuda_errors[i];
    return &cuda_errors[CUDA_ERRORS - 1];
}

API const char *cudaGetErrorName(cudaError_t error) { return find((int)error)->name; }

API const char *cudaGetErrorString(cudaError_t error) { return find((int)error)->text; }

/* The driver's errors have the runtime's numbers, as far as they are in the table. */
API CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = find((int)error)->name;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = find((int)error)->text;
    return CUDA_SUCCESS;
}

/* What an H200 says of itself. Sizes and counts are those of the data sheet and of deviceQuery. */
#include "fakegpu.h"

#include <stdio.h>
#include <string.h>

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    ENTER_QUERY();
    int gpu = device_gpu(device);
    if (gpu < 0) return device_error(cudaErrorInvalidDevice);
    *properties = (struct cudaDeviceProp){
        .name = "NVIDIA H200",
        .totalGlobalMem = settings()->memory_bytes,
        .sharedMemPerBlock = 48 << 10,
        .sharedMemPerBlockOptin = 227 << 10,
        .sharedMemPerMultiprocessor = 228 << 10,
        .reservedSharedMemPerBlock = 1 << 10,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .memPitch = 0x7fffffff,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {0x7fffffff, 65535, 65535},
        .totalConstMem = 65536,
        .major = 9,
        .minor = 0,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .multiProcessorCount = 132,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = 1,
        .pciBusID = gpu_pci_bus(gpu),
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = 6144,
        .l2CacheSize = 50 << 20,
        .maxThreadsPerMultiProcessor = 2048,
        .streamPrioritiesSupported = 1,
        .cooperativeLaunch = 1,
        .maxBlocksPerMultiProcessor = 32,
        .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1,
        .clusterLaunch = 1,
    };
    gpu_uuid_bytes(gpu, (unsigned char *)properties->uuid.bytes);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)properties.sharedMemPerBlockOptin;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)properties.sharedMemPerMultiprocessor;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = properties.maxThreadsPerMultiProcessor;
        break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        *value = properties.maxBlocksPerMultiProcessor;
        break;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1980000; break;       /* kHz */
    case cudaDevAttrMemoryClockRate: *value = 3201000; break; /* kHz */
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0; /* a feature that is not there, as far as torch asks */
    }
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    ENTER_QUERY();
    int gpu = device_gpu(device);
    if (gpu < 0) return device_error(cudaErrorInvalidDevice);
    snprintf(text, (size_t)length, "0000:%02X:00.0", (unsigned)gpu_pci_bus(gpu));
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER_QUERY();
    if (device_gpu(device) < 0 || device_gpu(peer) < 0) return device_error(cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    ENTER();
    (void)flags;
    return device_gpu(peer) < 0 ? device_error(cudaErrorInvalidDevice) : cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

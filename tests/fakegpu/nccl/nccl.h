/* NCCL's public types, as far as torch 2.5 to 2.15 use them: numbers and layouts are those of
 * NCCL's documentation ("Types", "Communicator Creation and Management"). */
#ifndef NCCL_H
#define NCCL_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclTimeout = 8,
} ncclResult_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12,
} ncclDataType_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5, /* and above: operations that the program has made */
} ncclRedOp_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

enum { NCCL_SPLIT_NOCOLOR = -1, NCCL_SHRINK_ABORT = 1 };

typedef struct ncclComm *ncclComm_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

/* The part that all versions share; `size` says how much of it a caller knows. INT_MIN and NULL
 * stand for "not set". */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass;     /* from 2.27 on, as is what follows */
    const char *commName;
} ncclConfig_t;

#endif

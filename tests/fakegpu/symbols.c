/* This library as a library: functions by name, and what a generated stub does. */
#include "fakegpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

void *own_symbol(const char *name) {
    static void *library;
    Dl_info self;
    if (library == NULL && dladdr((void *)own_symbol, &self) != 0)
        library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library != NULL ? dlsym(library, name) : NULL;
}

/* What a family of functions answers that is not simulated. `error` is its own "not supported". */
struct family {
    const char *prefix;
    bool computes; /* mathematics: nothing is computed, and success is reported */
    int error;
};

static const struct family families[] = {
    {"cublas", true, 15},    /* CUBLAS_STATUS_NOT_SUPPORTED */
    {"cudnn", true, 3000},   /* CUDNN_STATUS_NOT_SUPPORTED */
    {"cusparse", true, 10},  /* CUSPARSE_STATUS_NOT_SUPPORTED */
    {"cusolver", true, 9},   /* CUSOLVER_STATUS_NOT_SUPPORTED */
    {"curand", true, 999},   /* CURAND_STATUS_INTERNAL_ERROR */
    {"cufft", true, 16},     /* CUFFT_NOT_SUPPORTED */
    {"cupti", false, 15},    /* CUPTI_ERROR_NOT_INITIALIZED: the profiler goes on without */
    {"cuFile", false, 5001}, /* CU_FILE_DRIVER_NOT_INITIALIZED */
    {"nvml", false, 3},      /* NVML_ERROR_NOT_SUPPORTED */
    {"nvrtc", false, 11},    /* NVRTC_ERROR_INTERNAL_ERROR */
    {"nccl", false, 5},      /* ncclInvalidUsage */
    {"", false, 801},        /* cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED */
};

/* A stub jumps here with its own point (stubs.py). */
long stub_called(struct point *point) {
    int error = rules_suffer(point, -1, NULL);
    if (error != 0) return error;
    const struct family *family = families;
    while (strncmp(point->name, family->prefix, strlen(family->prefix)) != 0) family++;
    bool first = atomic_load(&point->passings) == 1;
    if (first) log_event("not-simulated", "function=%s", point->name);
    if (family->computes && !settings()->strict) return 0;
    if (first)
        fprintf(stderr, "fakegpu: %s is not simulated, and answers with its error %d\n",
                point->name, family->error);
    return family->error;
}

/* Kernels: those of torch, known by their mangled names, and how they are launched. What a kernel
 * computes is in elementwise.c and reduction.c; all others do nothing, in their turn. */
#include "fakegpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* --- registration: a module of device code gives each kernel's host function and name --------- */

struct kernel {
    const void *function;
    const char *name;
    bool reported;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kernel *kernels;
static size_t count, room;
static bool sorted;

static void unlock_in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void prepare_fork(void) {
    pthread_atfork(NULL, NULL, unlock_in_child);
}

static int by_function(const void *a, const void *b) {
    const struct kernel *first = a, *second = b;
    return (first->function > second->function) - (first->function < second->function);
}

/* With the lock held; NULL: no module has given it. */
static struct kernel *find(const void *function) {
    if (!sorted) qsort(kernels, count, sizeof *kernels, by_function);
    sorted = true;
    struct kernel wanted = {.function = function};
    return bsearch(&wanted, kernels, count, sizeof *kernels, by_function);
}

API void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    static void *module; /* one for all: nothing is kept for each */
    return &module;
}

API void __cudaRegisterFatBinaryEnd(void **module) { (void)module; }

API void __cudaUnregisterFatBinary(void **module) { (void)module; }

API char __cudaInitModule(void **module) {
    (void)module;
    return 1;
}

API void __cudaRegisterVar(void **module, char *host, char *device, const char *name, int external,
                           size_t bytes, int constant, int global) {
    (void)module, (void)host, (void)device, (void)name;
    (void)external, (void)bytes, (void)constant, (void)global;
}

API void __cudaRegisterFunction(void **module, const char *function, char *device, const char *name,
                                int threads, uint3 *thread, uint3 *block, dim3 *block_size,
                                dim3 *grid_size, int *warp_size) {
    (void)module, (void)device, (void)threads, (void)thread, (void)block;
    (void)block_size, (void)grid_size, (void)warp_size;
    pthread_mutex_lock(&lock);
    if (count == room) {
        room = room > 0 ? 2 * room : 65536; /* torch has some forty thousand */
        kernels = realloc(kernels, room * sizeof *kernels);
    }
    kernels[count++] = (struct kernel){function, name, false};
    sorted = false;
    pthread_mutex_unlock(&lock);
}

/* --- launching -------------------------------------------------------------------------------- */

static struct point kernel_point = {.name = "device:kernel"};

static enum progress do_nothing(void *state) {
    (void)state;
    return DONE;
}

/* Says once for each kernel that it is not computed. */
static cudaError_t not_simulated(struct kernel *kernel) {
    bool first = !kernel->reported;
    kernel->reported = true;
    if (first) log_event("not-simulated", "kernel=%s", kernel->name);
    return settings()->strict ? device_error(cudaErrorNotSupported) : cudaSuccess;
}

static cudaError_t launch(const void *function, void **arguments, cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    struct kernel *kernel = find(function);
    pthread_mutex_unlock(&lock);
    if (kernel == NULL) return device_error(cudaErrorInvalidDeviceFunction);
    struct work work = {.point = &kernel_point, .step = do_nothing, .comm_rank = -1};
    if (!elementwise_read(kernel->name, arguments, &work) &&
        !reduction_read(kernel->name, arguments, &work)) {
        cudaError_t error = not_simulated(kernel);
        if (error != cudaSuccess) return error;
    }
    return stream_enqueue(stream, &work);
}

API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                 size_t shared_bytes, cudaStream_t stream) {
    ENTER();
    (void)grid, (void)block, (void)shared_bytes;
    return launch(function, arguments, stream);
}

API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block,
                                            void **arguments, size_t shared_bytes,
                                            cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                    void **arguments) {
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments,
                            config->dynamicSmemBytes, config->stream);
}

/* What `kernel<<<...>>>` is compiled to: the configuration is pushed, the kernel's host function
 * pops it and launches with a handle, which is here the host function itself. */
struct configuration {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};

static __thread struct configuration pushed;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                         struct CUstream_st *stream) {
    pushed = (struct configuration){grid, block, shared_bytes, stream};
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                           void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_bytes = pushed.shared_bytes;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                   size_t shared_bytes, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

/* --- what torch asks about kernels before it launches them ------------------------------------ */

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    ENTER();
    (void)function;
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = 90,
        .binaryVersion = 90,
        .maxDynamicSharedSizeBytes = 48 << 10,
    };
    return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute,
                                     int value) {
    ENTER();
    (void)function, (void)attribute, (void)value;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_size, size_t shared_bytes, unsigned flags) {
    ENTER();
    (void)function, (void)shared_bytes, (void)flags;
    *blocks = block_size > 0 ? 2048 / block_size : 1;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                              int block_size, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size,
                                                                  shared_bytes, 0);
}

/* Allocations: memory of a device out of one window of addresses, pinned memory of the host.
 *
 * Addresses of the window are never handed out twice, so that what was freed is known for what it
 * is: work that touches it has an illegal address, as on a GPU. */
#include "fakegpu.h"

#include <stdlib.h>
#include <sys/mman.h>

/* More than all tests of a process allocate; addresses cost nothing before they are used. */
static const size_t window_bytes = (size_t)4 << 40;
static const size_t granularity = (size_t)2 << 20; /* of cudaMalloc's addresses */

struct allocation {
    struct allocation *next;
    char *start;
    size_t bytes;    /* as asked for */
    size_t reserved; /* of the window */
    int device;
    bool is_host, is_registered;
};

static struct allocation *allocations;
static char *window, *window_next;
static size_t taken[MAX_DEVICES];

/* --- what there is, with the device lock held ------------------------------------------------- */

bool memory_take(int device, size_t bytes) {
    if (taken[device] + bytes > settings()->memory_bytes) return false;
    taken[device] += bytes;
    return true;
}

void memory_give_back(int device, size_t bytes) { taken[device] -= bytes; }

size_t memory_taken(int device) { return taken[device]; }

static struct allocation **place_of(const void *address) {
    struct allocation **place = &allocations;
    for (; *place != NULL; place = &(*place)->next) {
        const char *start = (*place)->start;
        if ((const char *)address >= start && (const char *)address < start + (*place)->bytes)
            break;
    }
    return place;
}

static bool in_window(const void *address) {
    return window != NULL && (const char *)address >= window &&
           (const char *)address < window + window_bytes;
}

struct memory memory_at(const void *address) {
    const struct allocation *found = *place_of(address);
    if (found != NULL)
        return (struct memory){found->is_host ? PINNED : DEVICE_MEMORY, found->device, found->start,
                               found->bytes};
    if (in_window(address)) return (struct memory){.kind = NO_MEMORY};
    return mapped_memory_at(address);
}

bool memory_accessible(const void *address, size_t bytes) {
    const char *next = address, *end = next + bytes;
    while (next < end) {
        struct memory memory = memory_at(next);
        if (memory.kind == NO_MEMORY) return false;
        if (memory.kind == PAGEABLE)
            return true; /* of the host, which has its own ways to object */
        next = (char *)memory.start + memory.bytes;
    }
    return true;
}

static void add(struct allocation made) {
    struct allocation *allocation = malloc(sizeof *allocation);
    *allocation = made;
    allocation->next = allocations;
    allocations = allocation;
}

static size_t rounded(size_t bytes) {
    return (bytes + granularity - 1) / granularity * granularity;
}

/* NULL: no addresses or no memory left. */
static char *from_window(size_t bytes) {
    if (window == NULL) {
        window =
            mmap(NULL, window_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (window == MAP_FAILED) fatal("no addresses for device memory: is `ulimit -v` set?");
        window_next = window;
    }
    if (bytes > (size_t)(window + window_bytes - window_next)) return NULL;
    char *start = window_next;
    if (mprotect(start, bytes, PROT_READ | PROT_WRITE) != 0) return NULL;
    window_next += bytes;
    return start;
}

/* --- device memory ---------------------------------------------------------------------------- */

static cudaError_t allocate(void **address, size_t bytes) {
    *address = NULL;
    if (bytes == 0) return cudaSuccess;
    int device = device_current();
    size_t reserved = rounded(bytes);
    device_lock();
    if (memory_take(device, reserved)) {
        *address = from_window(reserved);
        if (*address == NULL) memory_give_back(device, reserved);
        else add((struct allocation){NULL, *address, bytes, reserved, device, false, false});
    }
    device_unlock();
    return device_error(*address != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

/* With the device lock held. False: `address` is not the start of such an allocation. */
static bool release(void *address, bool is_host) {
    struct allocation **place = place_of(address), *found = *place;
    if (found == NULL || found->start != address || found->is_host != is_host) return false;
    if (is_host) {
        if (!found->is_registered) munmap(found->start, found->bytes);
    } else {
        mmap(found->start, found->reserved, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        memory_give_back(found->device, found->reserved);
    }
    *place = found->next;
    free(found);
    return true;
}

API cudaError_t cudaMalloc(void **address, size_t bytes) {
    ENTER();
    return allocate(address, bytes);
}

/* Waits for the device, as CUDA does: behind a collective that hangs, so does this. */
API cudaError_t cudaFree(void *address) {
    ENTER();
    if (address == NULL) return cudaSuccess;
    device_lock();
    struct memory memory = memory_at(address);
    device_unlock();
    if (memory.kind != DEVICE_MEMORY) return device_error(cudaErrorInvalidValue);
    cudaError_t error = streams_synchronize(memory.device);
    if (error != cudaSuccess) return error;
    device_lock();
    bool released = release(address, false);
    device_unlock();
    return device_error(released ? cudaSuccess : cudaErrorInvalidValue);
}

/* The memory is there at once; a GPU would have it when the stream gets there. */
API cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) {
    ENTER();
    (void)stream;
    return allocate(address, bytes);
}

static enum progress release_in_stream(void *address) {
    return release(address, false) ? DONE : BAD_ADDRESS;
}

API cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    ENTER();
    return stream_enqueue(
        stream, &(struct work){.step = release_in_stream, .state = address, .comm_rank = -1});
}

API cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    ENTER();
    device_lock();
    *total = settings()->memory_bytes;
    *available = *total - memory_taken(device_current());
    device_unlock();
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                         const void *address) {
    ENTER();
    device_lock();
    struct memory memory = memory_at(address);
    device_unlock();
    bool known = memory.kind == PINNED || memory.kind == DEVICE_MEMORY;
    void *given = (void *)address;
    *attributes = (struct cudaPointerAttributes){
        .type = memory.kind == PINNED          ? cudaMemoryTypeHost
                : memory.kind == DEVICE_MEMORY ? cudaMemoryTypeDevice
                                               : cudaMemoryTypeUnregistered,
        .device = known ? memory.device : -1,
        .devicePointer = known ? given : NULL,
        .hostPointer = memory.kind == DEVICE_MEMORY ? NULL : given,
    };
    return cudaSuccess;
}

/* --- pinned memory of the host ---------------------------------------------------------------- */

API cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    ENTER();
    (void)flags;
    *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED) return device_error(cudaErrorMemoryAllocation);
    device_lock();
    add((struct allocation){NULL, *address, bytes, bytes, device_current(), true, false});
    device_unlock();
    return cudaSuccess;
}

API cudaError_t cudaMallocHost(void **address, size_t bytes) {
    return cudaHostAlloc(address, bytes, 0);
}

API cudaError_t cudaFreeHost(void *address) {
    ENTER();
    device_lock();
    bool released = address == NULL || release(address, true);
    device_unlock();
    return device_error(released ? cudaSuccess : cudaErrorInvalidValue);
}

API cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    ENTER();
    (void)flags;
    device_lock();
    add((struct allocation){NULL, address, bytes, bytes, device_current(), true, true});
    device_unlock();
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *address) {
    ENTER();
    device_lock();
    bool released = release(address, true);
    device_unlock();
    return device_error(released ? cudaSuccess : cudaErrorInvalidValue);
}

API cudaError_t cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags) {
    ENTER();
    (void)flags;
    *device_address = address;
    return cudaSuccess;
}

/* --- pools: one for each device, which has no limits of its own ------------------------------- */

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    ENTER_QUERY();
    static char pools[MAX_DEVICES];
    if (device_gpu(device) < 0) return device_error(cudaErrorInvalidDevice);
    *pool = (cudaMemPool_t)&pools[device];
    return cudaSuccess;
}

API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute,
                                        void *value) {
    ENTER();
    (void)pool, (void)attribute;
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute,
                                        void *value) {
    ENTER();
    (void)pool, (void)attribute, (void)value;
    return cudaSuccess;
}

API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool,
                                     const struct cudaMemAccessDesc *descriptions, size_t count) {
    ENTER();
    (void)pool, (void)descriptions, (void)count;
    return cudaSuccess;
}

API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    ENTER();
    (void)pool, (void)bytes;
    return cudaSuccess;
}

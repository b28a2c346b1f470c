/* Virtual memory management: memory and addresses apart, as `expandable_segments:True` uses it.
 *
 * A handle is an anonymous file, so that it can be mapped at several places and handed to another
 * process; a reserved range of addresses is one without access. */
#include "fakegpu.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const size_t granularity = (size_t)2 << 20; /* as on an H200 */

struct handle {
    int file, device;
    size_t bytes;
    int users;        /* the handle as long as it is not released, and mappings */
    bool is_imported; /* another process has taken the memory */
};

struct mapping {
    struct mapping *next;
    char *start;
    size_t bytes;
    struct handle *handle;
    bool accessible;
};

struct reservation {
    struct reservation *next;
    char *start;
    size_t bytes;
};

static struct mapping *mappings;
static struct reservation *reservations;

static bool contains(const char *start, size_t bytes, const void *address) {
    return (const char *)address >= start && (const char *)address < start + bytes;
}

struct memory mapped_memory_at(const void *address) {
    for (const struct mapping *mapping = mappings; mapping != NULL; mapping = mapping->next)
        if (contains(mapping->start, mapping->bytes, address))
            return (struct memory){mapping->accessible ? DEVICE_MEMORY : NO_MEMORY,
                                   mapping->handle->device, mapping->start, mapping->bytes};
    for (const struct reservation *range = reservations; range != NULL; range = range->next)
        if (contains(range->start, range->bytes, address))
            return (struct memory){.kind = NO_MEMORY};
    return (struct memory){.kind = PAGEABLE};
}

/* With the device lock held. */
static void leave(struct handle *handle) {
    if (--handle->users > 0) return;
    close(handle->file);
    if (!handle->is_imported) memory_give_back(handle->device, handle->bytes);
    free(handle);
}

/* --- memory ----------------------------------------------------------------------------------- */

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                           CUmemAllocationGranularity_flags option) {
    ENTER_DRIVER();
    (void)properties, (void)option;
    *bytes = granularity;
    return CUDA_SUCCESS;
}

static struct handle *make_handle(int file, int device, size_t bytes, bool is_imported) {
    struct handle *handle = malloc(sizeof *handle);
    *handle = (struct handle){file, device, bytes, 1, is_imported};
    return handle;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                         const CUmemAllocationProp *properties, unsigned long long flags) {
    ENTER_DRIVER();
    int device = properties->location.id;
    if (flags != 0 || bytes == 0 || bytes % granularity != 0 || device_gpu(device) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    device_lock();
    bool taken = memory_take(device, bytes);
    device_unlock();
    if (!taken) return CUDA_ERROR_OUT_OF_MEMORY;
    int file = memfd_create("fakegpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) fatal("no memory can be made");
    *handle = (CUmemGenericAllocationHandle)make_handle(file, device, bytes, false);
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER_DRIVER();
    device_lock();
    leave((struct handle *)handle);
    device_unlock();
    return CUDA_SUCCESS;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER_DRIVER();
    struct handle *found = NULL;
    device_lock();
    for (struct mapping *mapping = mappings; mapping != NULL && found == NULL;
         mapping = mapping->next)
        if (contains(mapping->start, mapping->bytes, address)) found = mapping->handle;
    if (found != NULL) found->users++;
    device_unlock();
    *handle = (CUmemGenericAllocationHandle)found;
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                    CUmemGenericAllocationHandle handle) {
    ENTER_DRIVER();
    *properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ((struct handle *)handle)->device},
    };
    return CUDA_SUCCESS;
}

/* --- addresses -------------------------------------------------------------------------------- */

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                 CUdeviceptr wanted, unsigned long long flags) {
    ENTER_DRIVER();
    (void)wanted; /* a wish */
    if (flags != 0 || bytes == 0 || bytes % granularity != 0) return CUDA_ERROR_INVALID_VALUE;
    if (alignment < granularity) alignment = granularity;
    /* More than enough, so that an aligned start is within; what is left over costs nothing. */
    char *found = mmap(NULL, bytes + alignment, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *start = (char *)(((uintptr_t)found + alignment - 1) / alignment * alignment);
    struct reservation *range = malloc(sizeof *range);
    device_lock();
    *range = (struct reservation){reservations, start, bytes};
    reservations = range;
    device_unlock();
    *address = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER_DRIVER();
    device_lock();
    struct reservation **place = &reservations, *range;
    while (*place != NULL && (*place)->start != (char *)address) place = &(*place)->next;
    range = *place;
    if (range != NULL && range->bytes == bytes) *place = range->next;
    else range = NULL;
    device_unlock();
    if (range == NULL) return CUDA_ERROR_INVALID_VALUE;
    munmap(range->start, range->bytes);
    free(range);
    return CUDA_SUCCESS;
}

static bool is_reserved(const char *start, size_t bytes) {
    for (const struct reservation *range = reservations; range != NULL; range = range->next)
        if (start >= range->start && start + bytes <= range->start + range->bytes) return true;
    return false;
}

static bool is_mapped(const char *start, size_t bytes) {
    for (const struct mapping *mapping = mappings; mapping != NULL; mapping = mapping->next)
        if (start < mapping->start + mapping->bytes && mapping->start < start + bytes) return true;
    return false;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                      CUmemGenericAllocationHandle given, unsigned long long flags) {
    ENTER_DRIVER();
    struct handle *handle = (struct handle *)given;
    char *start = (char *)address;
    device_lock();
    bool possible =
        flags == 0 && offset + bytes <= handle->bytes && is_reserved(start, bytes) &&
        !is_mapped(start, bytes) &&
        mmap(start, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->file, (off_t)offset) == start;
    if (possible) {
        struct mapping *mapping = malloc(sizeof *mapping);
        *mapping = (struct mapping){mappings, start, bytes, handle, false};
        mappings = mapping;
        handle->users++;
    }
    device_unlock();
    return possible ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *descriptions,
                            size_t count) {
    ENTER_DRIVER();
    char *start = (char *)address, *end = start + bytes;
    bool writable = count > 0 && descriptions[0].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    size_t found = 0;
    device_lock();
    for (struct mapping *mapping = mappings; mapping != NULL; mapping = mapping->next)
        if (mapping->start >= start && mapping->start + mapping->bytes <= end) {
            mprotect(mapping->start, mapping->bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ);
            mapping->accessible = true;
            found += mapping->bytes;
        }
    device_unlock();
    return found == bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Does not wait for the device, unlike cudaFree: who unmaps has to know that nothing uses it. */
API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER_DRIVER();
    char *start = (char *)address, *end = start + bytes;
    size_t found = 0;
    device_lock();
    for (struct mapping **place = &mappings; *place != NULL;) {
        struct mapping *mapping = *place;
        if (mapping->start < start || mapping->start + mapping->bytes > end) {
            place = &mapping->next;
            continue;
        }
        mmap(mapping->start, mapping->bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        found += mapping->bytes;
        leave(mapping->handle);
        *place = mapping->next;
        free(mapping);
    }
    device_unlock();
    return found == bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The allocation that an address belongs to, of either kind. */
#undef cuMemGetAddressRange
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    ENTER_DRIVER();
    device_lock();
    struct memory memory = memory_at((void *)address);
    device_unlock();
    if (memory.kind != DEVICE_MEMORY) return CUDA_ERROR_INVALID_VALUE;
    if (start != NULL) *start = (CUdeviceptr)memory.start;
    if (bytes != NULL) *bytes = memory.bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    return cuMemGetAddressRange_v2(start, bytes, address);
}

/* --- memory of another process ---------------------------------------------------------------- */

API CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType type,
                                          unsigned long long flags) {
    ENTER_DRIVER();
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0)
        return CUDA_ERROR_NOT_SUPPORTED; /* fabric handles need a fabric */
    *(int *)shared = fcntl(((struct handle *)handle)->file, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                            CUmemAllocationHandleType type) {
    ENTER_DRIVER();
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    int file = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = (CUmemGenericAllocationHandle)make_handle(file, device_current(),
                                                        (size_t)status.st_size, true);
    return CUDA_SUCCESS;
}

/* Copies and fills in streams. */
#include "fakegpu.h"

#include <stdlib.h>
#include <string.h>

static struct point copy_point = {.name = "device:copy"};
static struct point fill_point = {.name = "device:fill"};

struct copy {
    char *target;
    const char *source;
    size_t target_pitch, source_pitch, width, rows;
};

static enum progress run_copy(void *state) {
    const struct copy *copy = state;
    for (size_t row = 0; row < copy->rows; row++) {
        char *target = copy->target + row * copy->target_pitch;
        const char *source = copy->source + row * copy->source_pitch;
        if (!memory_accessible(target, copy->width) || !memory_accessible(source, copy->width))
            return BAD_ADDRESS;
        memmove(target, source, copy->width);
    }
    return DONE;
}

static enum memory_kind kind_of(const void *address) {
    device_lock();
    enum memory_kind kind = memory_at(address).kind;
    device_unlock();
    return kind;
}

/* Memory of the host that is not pinned is read before the call returns, and has been written when
 * it returns: the program may do with it what it likes from then on. */
static cudaError_t enqueue(struct copy wanted, cudaStream_t stream, bool is_waited_for) {
    if (wanted.width == 0 || wanted.rows == 0) return cudaSuccess;
    bool is_staged = kind_of(wanted.source) == PAGEABLE;
    size_t staged = is_staged ? wanted.width * wanted.rows : 0;
    struct copy *copy = malloc(sizeof *copy + staged);
    *copy = wanted;
    if (is_staged) {
        char *kept = (char *)(copy + 1);
        for (size_t row = 0; row < wanted.rows; row++)
            memcpy(kept + row * wanted.width, wanted.source + row * wanted.source_pitch,
                   wanted.width);
        copy->source = kept;
        copy->source_pitch = wanted.width;
    }
    bool is_pageable = kind_of(wanted.target) == PAGEABLE;
    cudaError_t error = stream_enqueue(stream, &(struct work){.point = &copy_point,
                                                              .step = run_copy,
                                                              .release = free,
                                                              .state = copy,
                                                              .comm_rank = -1});
    if (error == cudaSuccess && (is_waited_for || is_pageable)) error = stream_synchronize(stream);
    return error;
}

static struct copy flat(void *target, const void *source, size_t bytes) {
    return (struct copy){target, source, bytes, bytes, bytes, 1};
}

API cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes,
                           enum cudaMemcpyKind kind) {
    ENTER();
    (void)kind; /* addresses say it */
    return enqueue(flat(target, source, bytes), NULL, true);
}

API cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes,
                                enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER();
    (void)kind;
    return enqueue(flat(target, source, bytes), stream, false);
}

API cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source,
                                    int source_device, size_t bytes, cudaStream_t stream) {
    ENTER();
    (void)target_device, (void)source_device;
    return enqueue(flat(target, source, bytes), stream, false);
}

API cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source,
                                  size_t source_pitch, size_t width, size_t rows,
                                  enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER();
    (void)kind;
    struct copy copy = {target, source, target_pitch, source_pitch, width, rows};
    return enqueue(copy, stream, false);
}

/* Variables of device code have the address of their host's counterpart. */
API cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    ENTER();
    *address = (void *)symbol;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes,
                                   size_t offset, enum cudaMemcpyKind kind) {
    ENTER();
    (void)symbol, (void)source, (void)bytes, (void)offset, (void)kind;
    return cudaSuccess; /* only kernels read it */
}

/* --- fills ------------------------------------------------------------------------------------ */

struct fill {
    void *target;
    size_t bytes;
    int value;
};

static enum progress run_fill(void *state) {
    const struct fill *fill = state;
    if (!memory_accessible(fill->target, fill->bytes)) return BAD_ADDRESS;
    memset(fill->target, fill->value, fill->bytes);
    return DONE;
}

API cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
    ENTER();
    struct fill *fill = malloc(sizeof *fill);
    *fill = (struct fill){target, bytes, value};
    return stream_enqueue(stream, &(struct work){.point = &fill_point,
                                                 .step = run_fill,
                                                 .release = free,
                                                 .state = fill,
                                                 .comm_rank = -1});
}

API cudaError_t cudaMemset(void *target, int value, size_t bytes) {
    cudaError_t error = cudaMemsetAsync(target, value, bytes, NULL);
    return error == cudaSuccess ? stream_synchronize(NULL) : error;
}

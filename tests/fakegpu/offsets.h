/* Where elements of tensors with strides are: OffsetCalculator<N> of torch
 * (cuda/detail/OffsetCalculator.cuh) takes an index apart by the sizes of dimensions, the innermost
 * first, and puts it together by each tensor's strides in bytes. In memory it is {int dimensions;
 * divider sizes[25]; unsigned strides[25][N]}. */
#ifndef FAKEGPU_OFFSETS_H
#define FAKEGPU_OFFSETS_H

#include <stddef.h>
#include <string.h>

enum { MAX_DIMENSIONS = 25, MAX_TENSORS = 3 };

struct divider {
    unsigned divisor, magic, shift; /* the last two are for a fast division */
};

struct offsets {
    int dimensions, tensors;
    struct divider sizes[MAX_DIMENSIONS];
    unsigned strides[MAX_DIMENSIONS * MAX_TENSORS];
};

/* How much memory an OffsetCalculator<tensors> takes. */
static inline size_t offsets_bytes(int tensors) {
    return sizeof(int) +
           MAX_DIMENSIONS * (sizeof(struct divider) + sizeof(unsigned) * (size_t)tensors);
}

static inline void offsets_read(struct offsets *offsets, int tensors, const char *from) {
    offsets->tensors = tensors;
    memcpy(&offsets->dimensions, from, sizeof(int));
    memcpy(offsets->sizes, from + sizeof(int), sizeof offsets->sizes);
    memcpy(offsets->strides, from + sizeof(int) + sizeof offsets->sizes,
           MAX_DIMENSIONS * sizeof(unsigned) * (size_t)tensors);
}

/* The offset in bytes of element `index` of one of the tensors. */
static inline size_t offset_of(const struct offsets *offsets, int tensor, size_t index) {
    size_t bytes = 0;
    for (int i = 0; i < offsets->dimensions; i++) {
        bytes +=
            index % offsets->sizes[i].divisor * offsets->strides[i * offsets->tensors + tensor];
        index /= offsets->sizes[i].divisor;
    }
    return bytes;
}

#endif

/* Kernels that reduce dimensions of a tensor: sum, mean, norm, all, any, maximum, minimum. They are
 * instances of torch's reduce_kernel<threads, width, ReduceOp<...>> (ATen/native/cuda/Reduce.cuh),
 * whose one argument says all: where input and output are, and with which strides. */
#include "fakegpu.h"
#include "numbers.h"
#include "offsets.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- the argument's layout -------------------------------------------------------------------- */

struct config {
    int element_bytes, inputs, outputs, step_input, step_output, blocks_per_output;
    int input_factors[3], output_factors[2];
    int block_width, block_height, threads;
    bool vectorized;
    int output_width;
};

/* ReduceOp begins with the operation and the neutral element, of sizes that depend on types. Then
 * come a config and an OffsetCalculator<1> for the input, aligned like an int; an
 * OffsetCalculator<2> for the output, and for what of the input belongs to it; and these, aligned
 * like a pointer. */
struct places {
    const char *source;
    char *targets[2];
    void *accumulated, *of_blocks;
    int *semaphores;
    int64_t base_index;
    bool accumulates, is_final;
    int outputs;
};

/* --- computing -------------------------------------------------------------------------------- */

enum operation { SUM, NORM, ALL, ANY, MAXIMUM, MINIMUM };

struct reduction {
    enum operation operation;
    long double factor; /* of a mean */
    enum type from, to;
    struct config config;
    struct offsets input, output;
    struct places places;
};

static long double combine(enum operation operation, long double sum, long double value) {
    switch (operation) {
    case SUM: return sum + value;
    case NORM: return sum + value * value;
    case ALL: return sum != 0 && value != 0;
    case ANY: return sum != 0 || value != 0;
    case MAXIMUM: return sum != sum || sum > value ? sum : value; /* NaN is larger than all else */
    case MINIMUM: return sum != sum || sum < value ? sum : value;
    }
    return 0;
}

static long double neutral(enum operation operation) {
    switch (operation) {
    case ALL: return 1;
    case MAXIMUM: return -INFINITY;
    case MINIMUM: return INFINITY;
    default: return 0;
    }
}

/* False: an illegal address. */
static bool reduce_one(const struct reduction *reduction, unsigned index) {
    const char *source = reduction->places.source + offset_of(&reduction->output, 1, index);
    char *target = reduction->places.targets[0] + offset_of(&reduction->output, 0, index);
    long double sum = neutral(reduction->operation);
    for (unsigned i = 0; i < (unsigned)reduction->config.inputs; i++) {
        const char *element = source + offset_of(&reduction->input, 0, i);
        if (!memory_accessible(element, number_bytes(reduction->from))) return false;
        sum = combine(reduction->operation, sum, number_load(reduction->from, element));
    }
    if (reduction->operation == NORM) sum = sqrtl(sum);
    if (!memory_accessible(target, number_bytes(reduction->to))) return false;
    number_store(reduction->to, target, sum * reduction->factor);
    return true;
}

static enum progress run(void *state) {
    const struct reduction *reduction = state;
    for (unsigned i = 0; i < (unsigned)reduction->config.outputs; i++)
        if (!reduce_one(reduction, i)) return BAD_ADDRESS;
    return DONE;
}

/* --- reading a launch ------------------------------------------------------------------------- */

static const struct {
    const char *name;
    enum operation operation;
    size_t bytes; /* of the operation's object */
} operations[] = {
    {"11sum_functorI", SUM, 1},       {"7MeanOpsI", SUM, sizeof(float)},
    {"10NormTwoOpsI", NORM, 1},       {"15and_kernel_cudaE", ALL, 1},
    {"14or_kernel_cudaE", ANY, 1},    {"13MaxNanFunctorI", MAXIMUM, 1},
    {"13MinNanFunctorI", MINIMUM, 1},
};

/* ReduceOp<from, operation, unsigned ("j"), to, 4, width>: `to` follows the last "Ej". */
static bool read_types(const char *text, struct reduction *reduction) {
    if (!number_read_type(&text, TYPES, &reduction->from)) return false;
    const char *last = NULL;
    for (const char *next = text; (next = strstr(next, "Ej")) != NULL; next++) last = next;
    if (last == NULL) return false;
    last += strlen("Ej");
    return number_read_type(&last, reduction->from, &reduction->to);
}

static size_t aligned(size_t offset, size_t alignment) {
    return (offset + alignment - 1) / alignment * alignment;
}

bool reduction_read(const char *name, void **arguments, struct work *work) {
    const char *text = strstr(name, "13reduce_kernelI");
    if (text == NULL || (text = strstr(text, "8ReduceOpI")) == NULL) return false;
    struct reduction reduction = {.factor = 1};
    size_t which = 0, count = sizeof operations / sizeof *operations;
    while (which < count && strstr(text, operations[which].name) == NULL) which++;
    if (which == count || !read_types(text + strlen("8ReduceOpI"), &reduction)) return false;
    reduction.operation = operations[which].operation;
    const char *argument = arguments[0];
    if (operations[which].bytes == sizeof(float)) reduction.factor = number_load(FLOAT, argument);
    /* The neutral element has the type in which is summed. */
    size_t bytes = number_bytes(number_compute_type(reduction.from));
    size_t offset = aligned(aligned(operations[which].bytes, bytes) + bytes, sizeof(int));
    memcpy(&reduction.config, argument + offset, sizeof reduction.config);
    offset += sizeof reduction.config;
    offsets_read(&reduction.input, 1, argument + offset);
    offset += offsets_bytes(1);
    offsets_read(&reduction.output, 2, argument + offset);
    offset = aligned(offset + offsets_bytes(2), sizeof(void *));
    memcpy(&reduction.places, argument + offset, sizeof reduction.places);
    if (reduction.places.accumulates || !reduction.places.is_final)
        return false; /* a part of one that is too large for 32 bits */
    work->state = malloc(sizeof reduction);
    memcpy(work->state, &reduction, sizeof reduction);
    work->step = run;
    work->release = free;
    return true;
}

/* Kernels that compute each element by itself: fills, copies with and without conversion, sums,
 * products, quotients, comparisons. They are instances of three templates of torch
 * (ATen/native/cuda/CUDALoops.cuh). The first two are for tensors without gaps, the third for all
 * others:
 *
 *   vectorized_elementwise_kernel<width, functor, pointers>(int count, functor, pointers)
 *   unrolled_elementwise_kernel<functor, pointers, ...>(int count, functor, pointers, offsets of
 *                                                        inputs, of outputs, loader, storer)
 *   elementwise_kernel<threads, width, gpu_kernel_impl_nocast<functor>::lambda>(int count, lambda)
 *
 * `pointers` has the output first. What the functor does, and with which types, is in the mangled
 * name; its scalar operands are in the functor, whose layout is that of its template (Loops.cuh,
 * BinaryOps). The lambda has an OffsetCalculator, the pointers and the functor. */
#include "fakegpu.h"
#include "numbers.h"
#include "offsets.h"

#include <stdlib.h>
#include <string.h>

enum operation {
    FILL,
    COPY,
    ADD,
    MULTIPLY,
    DIVIDE,
    EQUAL,
    UNEQUAL,
    AT_LEAST,
    ABOVE,
    AT_MOST,
    BELOW
};

/* Where an operand comes from. */
enum source { ABSENT, TENSOR, SCALAR };

struct operand {
    enum source source;
    enum type type;
    int tensor;        /* its number; the output has 0 */
    long double value; /* of a scalar */
};

struct elementwise {
    enum operation operation;
    size_t count;
    char *pointers[MAX_TENSORS];
    enum type type; /* of the output */
    struct operand operands[2];
    long double alpha; /* the second operand of ADD is multiplied by it */
    bool has_gaps;
    struct offsets offsets;
};

/* --- computing -------------------------------------------------------------------------------- */

/* NULL: an illegal address. */
static char *element(const struct elementwise *kernel, int tensor, enum type type, size_t index) {
    size_t bytes = number_bytes(type);
    char *start = kernel->pointers[tensor];
    if (!kernel->has_gaps) return start + index * bytes; /* looked at once, as a whole */
    start += offset_of(&kernel->offsets, tensor, index);
    return memory_accessible(start, bytes) ? start : NULL;
}

static bool get(const struct elementwise *kernel, int which, size_t index, long double *value) {
    const struct operand *operand = &kernel->operands[which];
    *value = operand->value;
    if (operand->source != TENSOR) return true;
    const char *address = element(kernel, operand->tensor, operand->type, index);
    if (address == NULL) return false;
    *value = number_load(operand->type, address);
    return true;
}

static long double compute(const struct elementwise *kernel, long double a, long double b) {
    switch (kernel->operation) {
    case FILL:
    case COPY: return a;
    case ADD: return a + kernel->alpha * b;
    case MULTIPLY: return a * b;
    case DIVIDE: return a / b;
    case EQUAL: return a == b;
    case UNEQUAL: return a != b;
    case AT_LEAST: return a >= b;
    case ABOVE: return a > b;
    case AT_MOST: return a <= b;
    case BELOW: return a < b;
    }
    return 0;
}

/* Of tensors without gaps. */
static bool accessible(const struct elementwise *kernel) {
    for (int i = 0; i < 2; i++) {
        const struct operand *operand = &kernel->operands[i];
        if (operand->source == TENSOR &&
            !memory_accessible(kernel->pointers[operand->tensor],
                               kernel->count * number_bytes(operand->type)))
            return false;
    }
    return memory_accessible(kernel->pointers[0], kernel->count * number_bytes(kernel->type));
}

static enum progress run(void *state) {
    const struct elementwise *kernel = state;
    if (!kernel->has_gaps && !accessible(kernel)) return BAD_ADDRESS;
    for (size_t i = 0; i < kernel->count; i++) {
        long double a, b;
        char *target = element(kernel, 0, kernel->type, i);
        if (target == NULL || !get(kernel, 0, i, &a) || !get(kernel, 1, i, &b)) return BAD_ADDRESS;
        number_store(kernel->type, target, compute(kernel, a, b));
    }
    return DONE;
}

/* --- reading a launch ------------------------------------------------------------------------- */

/* Behind `prefix`, where `text` begins with it; NULL otherwise. */
static const char *after(const char *text, const char *prefix) {
    size_t length = strlen(prefix);
    return strncmp(text, prefix, length) == 0 ? text + length : NULL;
}

static bool converts(const char *name) { return strstr(name, "LoadWithCast") != NULL; }

/* A scalar in a functor, `skipped` bytes after its start or at its alignment behind that. */
static struct operand scalar(enum type type, const char *functor, size_t skipped) {
    size_t alignment = number_bytes(type);
    size_t offset = (skipped + alignment - 1) / alignment * alignment;
    return (struct operand){SCALAR, type, 0, number_load(type, functor + offset)};
}

static struct operand tensor(enum type type, int number) {
    return (struct operand){TENSOR, type, number, 0};
}

/* FillFunctor<T> { T value } */
static bool read_fill(const char *text, struct elementwise *kernel, const char *functor) {
    if ((text = after(text, "NS0_11FillFunctorI")) == NULL) return false;
    if (!number_read_type(&text, TYPES, &kernel->type)) return false;
    kernel->operation = FILL;
    kernel->operands[0] = scalar(kernel->type, functor, 0);
    return true;
}

/* A lambda T(T) of direct_copy_kernel_cuda. */
static bool read_copy(const char *text, struct elementwise *kernel) {
    if (after(text, "ZZZNS0_23direct_copy_kernel_cuda") == NULL) return false;
    text = strstr(text, "EUl");
    if (text == NULL) return false;
    text += strlen("EUl");
    if (!number_read_type(&text, TYPES, &kernel->type)) return false;
    kernel->operation = COPY;
    kernel->operands[0] = tensor(kernel->type, 1);
    return true;
}

/* Lambdas H(float), for a half H. */
static bool read_copy_to_half(const char *text, struct elementwise *kernel) {
    if (after(text, "ZNS0_25bfloat16_copy_kernel_cuda") != NULL) kernel->type = BFLOAT16;
    else if (after(text, "ZNS0_24float16_copy_kernel_cuda") != NULL) kernel->type = HALF;
    else return false;
    kernel->operation = COPY;
    kernel->operands[0] = tensor(FLOAT, 1);
    return strstr(text, "EUlfE_") != NULL;
}

/* A lambda To(From) of converting_copy_kernel_cuda<From, To>, from torch 2.15 on. */
static bool read_converting_copy(const char *text, struct elementwise *kernel) {
    enum type from;
    if ((text = after(text, "ZNS0_27converting_copy_kernel_cudaI")) == NULL) return false;
    if (!number_read_type(&text, TYPES, &from) || !number_read_type(&text, from, &kernel->type))
        return false;
    kernel->operation = COPY;
    kernel->operands[0] = tensor(from, 1);
    return true;
}

/* CUDAFunctor_add<T> { C alpha }; CUDAFunctorOnSelf_add<T> and OnOther { C scalar; C alpha } */
static bool read_add(const char *text, struct elementwise *kernel, const char *functor) {
    const char *on_both = after(text, "NS0_15CUDAFunctor_addI");
    const char *on_self = after(text, "NS0_21CUDAFunctorOnSelf_addI");
    const char *on_other = after(text, "NS0_22CUDAFunctorOnOther_addI");
    text = on_both ? on_both : on_self ? on_self : on_other;
    if (text == NULL || !number_read_type(&text, TYPES, &kernel->type)) return false;
    enum type computed = number_compute_type(kernel->type);
    size_t bytes = number_bytes(computed);
    kernel->operation = ADD;
    kernel->alpha = number_load(computed, functor + (on_both ? 0 : bytes));
    struct operand first = tensor(kernel->type, 1);
    kernel->operands[0] = on_other ? scalar(computed, functor, 0) : first;
    kernel->operands[1] = on_both   ? tensor(kernel->type, 2)
                          : on_self ? scalar(computed, functor, 0)
                                    : first;
    return true;
}

static const enum operation orders[] = {AT_LEAST, ABOVE, AT_MOST, BELOW};

/* compare_scalar_kernel<T>: a lambda { enum { GE, GT, LE, LT }; T scalar } */
static bool read_comparison(const char *text, struct elementwise *kernel, const char *functor) {
    if ((text = after(text, "ZNS0_21compare_scalar_kernelI")) == NULL) return false;
    enum type type;
    unsigned order;
    memcpy(&order, functor, sizeof order);
    if (order > 3 || !number_read_type(&text, TYPES, &type)) return false;
    kernel->operation = orders[order];
    kernel->type = BOOL;
    kernel->operands[0] = tensor(type, 1);
    kernel->operands[1] = scalar(type, functor, sizeof order);
    return true;
}

/* CompareFunctor<T> { enum { GE, GT, LE, LT } }, of an anonymous namespace */
static bool read_comparison_of_two(const char *text, struct elementwise *kernel,
                                   const char *functor) {
    if (after(text, "NS0_") == NULL || strstr(text, "BinaryFunctorI") != NULL ||
        (text = strstr(text, "14CompareFunctorI")) == NULL)
        return false;
    text += strlen("14CompareFunctorI");
    enum type type;
    unsigned order;
    memcpy(&order, functor, sizeof order);
    if (order > 3 || !number_read_type(&text, TYPES, &type)) return false;
    kernel->operation = orders[order];
    kernel->type = BOOL;
    kernel->operands[0] = tensor(type, 1);
    kernel->operands[1] = tensor(type, 2);
    return true;
}

/* The function within a Binary-, AUnary- or BUnaryFunctor, and how much of it is kept there. */
static bool read_function(const char *text, const char *functor, enum operation *operation,
                          size_t *bytes) {
    int number;
    memcpy(&number, functor, sizeof number);
    *bytes = 1; /* a class without members */
    if (strstr(text, "10MulFunctorI") != NULL) {
        *operation = MULTIPLY;
    } else if (strstr(text, "10DivFunctorI") != NULL) {
        *operation = DIVIDE;
    } else if (strstr(text, "16CompareEqFunctorI") != NULL) { /* { enum { EQ, NE } } */
        *operation = number == 0 ? EQUAL : UNEQUAL;
        *bytes = sizeof number;
    } else {
        return false;
    }
    return true;
}

/* BinaryFunctor<T, T, R, F> { F }; AUnaryFunctor { F; C a } and BUnaryFunctor { F; C b } */
static bool read_binary(const char *text, struct elementwise *kernel, const char *functor) {
    const char *both = after(text, "NS0_13BinaryFunctorI");
    const char *with_a = after(text, "NS0_13AUnaryFunctorI");
    const char *with_b = after(text, "NS0_13BUnaryFunctorI");
    text = both ? both : with_a ? with_a : with_b;
    enum type a, b;
    size_t bytes;
    if (text == NULL || !number_read_type(&text, TYPES, &a) || !number_read_type(&text, a, &b) ||
        !number_read_type(&text, a, &kernel->type) ||
        !read_function(text, functor, &kernel->operation, &bytes))
        return false;
    kernel->operands[0] = with_a ? scalar(number_compute_type(a), functor, bytes) : tensor(a, 1);
    kernel->operands[1] = both     ? tensor(b, 2)
                          : with_b ? scalar(number_compute_type(b), functor, bytes)
                                   : tensor(b, 1);
    return true;
}

/* LoadWithCast<1> and StoreWithCast<1> begin with the type in memory, a c10::ScalarType. */
static bool read_conversion(void **arguments, struct elementwise *kernel) {
    if (kernel->operation != COPY) return false;
    kernel->operands[0].type = number_of_scalar_type(*(signed char *)arguments[5]);
    kernel->type = number_of_scalar_type(*(signed char *)arguments[6]);
    return kernel->operands[0].type != TYPES && kernel->type != TYPES;
}

/* How many tensors there are, the output included. */
static int tensors_of(const char *text) {
    static const char *const one_input[] = {"NS0_13AUnaryFunctorI", "NS0_13BUnaryFunctorI",
                                            "NS0_21CUDAFunctorOnSelf_addI",
                                            "NS0_22CUDAFunctorOnOther_addI", "Z" /* a lambda */};
    if (after(text, "NS0_11FillFunctorI") != NULL) return 1;
    for (size_t i = 0; i < sizeof one_input / sizeof *one_input; i++)
        if (after(text, one_input[i]) != NULL) return 2;
    return 3;
}

/* The functor's name, in the name of an instance of one of the templates; NULL: of none. */
static const char *functor_in(const char *name, bool *has_gaps) {
    *has_gaps = after(name, "_ZN2at6native18elementwise_kernelILi") != NULL;
    if (*has_gaps) {
        const char *lambda = strstr(name, "EZNS0_22gpu_kernel_impl_nocastI");
        return lambda != NULL ? after(lambda, "EZNS0_22gpu_kernel_impl_nocastI") : NULL;
    }
    const char *text = after(name, "_ZN2at6native29vectorized_elementwise_kernelILi");
    if (text != NULL) return strchr(text, 'E') + 1;
    text = after(name, "_ZN2at6native27unrolled_elementwise_kernelI");
    return text != NULL && strstr(text, "TrivialOffsetCalculator") != NULL ? text : NULL;
}

/* Take the arguments apart; the functor's place. */
static const char *read_arguments(const char *text, void **arguments, struct elementwise *kernel) {
    size_t tensors = (size_t)tensors_of(text), bytes = tensors * sizeof(char *);
    kernel->count = (size_t)*(int *)arguments[0];
    if (!kernel->has_gaps) {
        memcpy(kernel->pointers, arguments[2], bytes);
        return arguments[1];
    }
    const char *lambda = arguments[1];
    offsets_read(&kernel->offsets, (int)tensors, lambda);
    size_t pointers = offsets_bytes((int)tensors);
    pointers = (pointers + sizeof(char *) - 1) / sizeof(char *) * sizeof(char *);
    memcpy(kernel->pointers, lambda + pointers, bytes);
    return lambda + pointers + bytes;
}

bool elementwise_read(const char *name, void **arguments, struct work *work) {
    struct elementwise kernel = {0};
    const char *text = functor_in(name, &kernel.has_gaps);
    if (text == NULL) return false;
    const char *functor = read_arguments(text, arguments, &kernel);
    if (!read_fill(text, &kernel, functor) && !read_copy(text, &kernel) &&
        !read_copy_to_half(text, &kernel) && !read_converting_copy(text, &kernel) &&
        !read_add(text, &kernel, functor) &&
        !read_comparison(text, &kernel, functor) &&
        !read_comparison_of_two(text, &kernel, functor) && !read_binary(text, &kernel, functor))
        return false;
    if (converts(name) && !read_conversion(arguments, &kernel)) return false;
    work->state = malloc(sizeof kernel);
    memcpy(work->state, &kernel, sizeof kernel);
    work->step = run;
    work->release = free;
    return true;
}

/* The types of tensors' elements, for what computes. A long double holds each value of each
 * exactly. */
#ifndef FAKEGPU_NUMBERS_H
#define FAKEGPU_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>

enum type { BOOL, UINT8, INT8, INT16, INT32, INT64, HALF, BFLOAT16, FLOAT, DOUBLE, TYPES };

size_t number_bytes(enum type type);
long double number_load(enum type type, const void *address);
void number_store(enum type type, void *address, long double value);

/* The type in which torch keeps scalars and sums of a type: float for the halves. */
enum type number_compute_type(enum type type);

/* Read a type from a mangled name, and move `text` behind it. `first` is what a substitution
 * ("S4_") stands for. False: a type that is not in the list. */
bool number_read_type(const char **text, enum type first, enum type *type);

/* The type with a number of c10::ScalarType; TYPES: it is not in the list. */
enum type number_of_scalar_type(int number);

#endif

/* Elements of tensors: loaded, stored, named. */
#include "numbers.h"

#include <ctype.h>
#include <stdint.h>
#include <string.h>

static const struct {
    const char *mangled;
    size_t bytes;
    int scalar_type; /* number in c10::ScalarType */
} types[TYPES] = {
    [BOOL] = {"b", 1, 11},          [UINT8] = {"h", 1, 0},
    [INT8] = {"a", 1, 1},           [INT16] = {"s", 2, 2},
    [INT32] = {"i", 4, 3},          [INT64] = {"l", 8, 4},
    [HALF] = {"N3c104HalfE", 2, 5}, [BFLOAT16] = {"N3c108BFloat16E", 2, 15},
    [FLOAT] = {"f", 4, 6},          [DOUBLE] = {"d", 8, 7},
};

size_t number_bytes(enum type type) { return types[type].bytes; }

static float bfloat16_load(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To nearest, ties to even, as the hardware rounds. */
static uint16_t bfloat16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define LOAD(c_type)                                                                               \
    do {                                                                                           \
        c_type value;                                                                              \
        memcpy(&value, address, sizeof value);                                                     \
        return (long double)value;                                                                 \
    } while (0)

long double number_load(enum type type, const void *address) {
    switch (type) {
    case BOOL:
    case UINT8: LOAD(uint8_t);
    case INT8: LOAD(int8_t);
    case INT16: LOAD(int16_t);
    case INT32: LOAD(int32_t);
    case INT64: LOAD(int64_t);
    case HALF: LOAD(_Float16);
    case FLOAT: LOAD(float);
    case DOUBLE: LOAD(double);
    case BFLOAT16: {
        uint16_t bits;
        memcpy(&bits, address, sizeof bits);
        return bfloat16_load(bits);
    }
    case TYPES: break;
    }
    return 0;
}

#define STORE(c_type)                                                                              \
    do {                                                                                           \
        c_type stored = (c_type)value;                                                             \
        memcpy(address, &stored, sizeof stored);                                                   \
    } while (0)

void number_store(enum type type, void *address, long double value) {
    switch (type) {
    case BOOL: *(uint8_t *)address = value != 0; break;
    case UINT8: *(uint8_t *)address = (uint8_t)(int64_t)value; break;
    case INT8: *(int8_t *)address = (int8_t)(int64_t)value; break;
    case INT16: STORE(int16_t); break;
    case INT32: STORE(int32_t); break;
    case INT64: STORE(int64_t); break;
    case HALF: STORE(_Float16); break;
    case FLOAT: STORE(float); break;
    case DOUBLE: STORE(double); break;
    case BFLOAT16: {
        uint16_t bits = bfloat16_of((float)value);
        memcpy(address, &bits, sizeof bits);
        break;
    }
    case TYPES: break;
    }
}

enum type number_compute_type(enum type type) {
    return type == HALF || type == BFLOAT16 ? FLOAT : type;
}

static bool read_substitution(const char **text) {
    const char *next = *text;
    if (*next != 'S') return false;
    for (next++; isdigit((unsigned char)*next) || isupper((unsigned char)*next);) next++;
    if (*next != '_') return false;
    *text = next + 1;
    return true;
}

bool number_read_type(const char **text, enum type first, enum type *type) {
    if (first != TYPES && read_substitution(text)) {
        *type = first;
        return true;
    }
    for (int each = 0; each < TYPES; each++)
        if (strncmp(*text, types[each].mangled, strlen(types[each].mangled)) == 0) {
            *text += strlen(types[each].mangled);
            *type = (enum type)each;
            return true;
        }
    return false;
}

enum type number_of_scalar_type(int number) {
    int each = 0;
    while (each < TYPES && types[each].scalar_type != number) each++;
    return (enum type)each;
}

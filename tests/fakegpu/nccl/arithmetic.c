/* Elements of NCCL's types, and what reductions make of them: each sum is rounded once, at its
 * end. */
#include "nccl/internal.h"

#include <math.h>
#include <string.h>

size_t type_bytes(ncclDataType_t type) {
    static const unsigned char bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return bytes[type];
}

/* --- floats of 8 bits: sign, exponent, mantissa. E4M3 has no infinity, and NaN is all ones ---- */

struct small_float {
    int mantissa_bits, bias;
    bool has_infinity;
    long double largest;
};

static const struct small_float e4m3 = {3, 7, false, 448};
static const struct small_float e5m2 = {2, 15, true, 57344};

static long double small_load(const struct small_float *kind, uint8_t bits) {
    int units = 1 << kind->mantissa_bits;
    int mantissa = bits & (units - 1), exponent = (bits & 0x7f) >> kind->mantissa_bits;
    long double sign = bits & 0x80 ? -1 : 1;
    bool is_top = exponent == 0x7f >> kind->mantissa_bits;
    if (kind->has_infinity && is_top) return mantissa != 0 ? NAN : sign * INFINITY;
    if (!kind->has_infinity && (bits & 0x7f) == 0x7f) return NAN;
    if (exponent == 0) return sign * ldexpl(mantissa, 1 - kind->bias - kind->mantissa_bits);
    return sign * ldexpl(units + mantissa, exponent - kind->bias - kind->mantissa_bits);
}

/* To nearest, ties to even; what is too large becomes the largest, as in CUDA's conversions. */
static uint8_t small_store(const struct small_float *kind, long double value) {
    uint8_t sign = signbit(value) ? 0x80 : 0;
    long double size = fabsl(value);
    if (isnan(value)) return sign | 0x7f;
    if (size >= kind->largest) size = kind->largest;
    int exponent = size == 0 ? -1000 : ilogbl(size), lowest = 1 - kind->bias;
    if (exponent < lowest) exponent = lowest;
    /* units of the last place; a carry goes into the exponent, since the fields are neighbours */
    int units = (int)rintl(ldexpl(size, kind->mantissa_bits - exponent));
    int one = 1 << kind->mantissa_bits;
    return sign | (uint8_t)((exponent - lowest) * one + units);
}

/* --- all types -------------------------------------------------------------------------------- */

#define LOAD(c_type)                           \
    do {                                       \
        c_type value;                          \
        memcpy(&value, address, sizeof value); \
        return (long double)value;             \
    } while (0)

long double type_load(ncclDataType_t type, const void *address) {
    switch (type) {
    case ncclInt8: LOAD(int8_t);
    case ncclUint8: LOAD(uint8_t);
    case ncclInt32: LOAD(int32_t);
    case ncclUint32: LOAD(uint32_t);
    case ncclInt64: LOAD(int64_t);
    case ncclUint64: LOAD(uint64_t);
    case ncclFloat16: LOAD(_Float16);
    case ncclFloat32: LOAD(float);
    case ncclFloat64: LOAD(double);
    case ncclBfloat16: {
        uint16_t half;
        memcpy(&half, address, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    case ncclFloat8e4m3: return small_load(&e4m3, *(const uint8_t *)address);
    case ncclFloat8e5m2: return small_load(&e5m2, *(const uint8_t *)address);
    case ncclNumTypes: break;
    }
    return 0;
}

#define STORE(c_type)                            \
    do {                                         \
        c_type stored = (c_type)value;           \
        memcpy(address, &stored, sizeof stored); \
    } while (0)

void type_store(ncclDataType_t type, void *address, long double value) {
    switch (type) {
    case ncclInt8: *(int8_t *)address = (int8_t)(int64_t)value; break;
    case ncclUint8: *(uint8_t *)address = (uint8_t)(int64_t)value; break;
    case ncclInt32: {
        int32_t stored = (int32_t)(int64_t)value; /* overflow wraps, as on the device */
        memcpy(address, &stored, sizeof stored);
        break;
    }
    case ncclUint32: {
        uint32_t stored = (uint32_t)(int64_t)value;
        memcpy(address, &stored, sizeof stored);
        break;
    }
    case ncclInt64: STORE(int64_t); break;
    case ncclUint64: STORE(uint64_t); break;
    case ncclFloat16: STORE(_Float16); break;
    case ncclFloat32: STORE(float); break;
    case ncclFloat64: STORE(double); break;
    case ncclBfloat16: {
        float rounded = (float)value;
        uint32_t bits;
        memcpy(&bits, &rounded, sizeof bits);
        uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        if (isnan(rounded)) half = 0x7fc0;
        memcpy(address, &half, sizeof half);
        break;
    }
    case ncclFloat8e4m3: *(uint8_t *)address = small_store(&e4m3, value); break;
    case ncclFloat8e5m2: *(uint8_t *)address = small_store(&e5m2, value); break;
    case ncclNumTypes: break;
    }
}

static long double combine(long double a, long double b, ncclRedOp_t reduction) {
    switch (reduction) {
    case ncclProd: return a * b;
    case ncclMax: return a > b || isnan(a) ? a : b;
    case ncclMin: return a < b || isnan(a) ? a : b;
    default: return a + b;
    }
}

void reduce(char *target, char *const *sources, int ranks, size_t count, ncclDataType_t type,
            ncclRedOp_t reduction) {
    size_t bytes = type_bytes(type);
    for (size_t place = 0; place < count * bytes; place += bytes) {
        long double value = type_load(type, sources[0] + place);
        for (int rank = 1; rank < ranks; rank++)
            value = combine(value, type_load(type, sources[rank] + place), reduction);
        if (reduction == ncclAvg) value /= ranks;
        type_store(type, target + place, value);
    }
}

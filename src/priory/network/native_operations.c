/* Runs a list of operations on small strided arrays: what `native_program.py` writes.

An operation is a row of 64-bit words: its code, the number of dimensions, the number of arrays, their addresses (the
result first), and for each dimension, outermost first, its size and the distance in bytes between entries of each
array. An array that is broadcast has distance 0. A result overlaps no argument.

REAL is the type of the numbers, double or float. The codes are the positions in `native_library.OPERATIONS`. */

#include <stdint.h>
#include <tgmath.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
/* glibc has vector forms of these */
#define VECTOR_FORM __attribute__((simd("notinbranch")))
VECTOR_FORM double(exp)(double);
VECTOR_FORM float(expf)(float);
VECTOR_FORM double(log)(double);
VECTOR_FORM float(logf)(float);
#endif

enum {
    COPY, NEG, EXP, LOG, LOG1P, SQRT, TANH, SIGMOID, ABS, SIN, COS,
    ADD, SUB, MUL, DIV, POW, MAXIMUM, MINIMUM,
    GE, GT, LE, LT, EQ, NE,
    ADDCMUL, WHERE,
    SUM, MAX, DOT
};
enum { MOST_ARRAYS = 4 };

#define AT(type, k, i) (*(type *)(p[k] + (i) * s[k]))
#define ROW(k) REAL *restrict r##k = (REAL *)p[k]
#define FULL(k) (s[k] == sizeof(REAL))

#define UNARY(value)                                                                  \
    {                                                                                 \
        ROW(0), *restrict r1 = (REAL *)p[1];                                          \
        if (FULL(0) && FULL(1))                                                       \
            for (int64_t i = 0; i < n; i++) { REAL x = r1[i]; r0[i] = value; }        \
        else                                                                          \
            for (int64_t i = 0; i < n; i++) { REAL x = AT(REAL, 1, i); AT(REAL, 0, i) = value; } \
        break;                                                                        \
    }

#define BINARY(type, value)                                                                         \
    {                                                                                               \
        ROW(1), *restrict r2 = (REAL *)p[2];                                                        \
        type *restrict r0 = (type *)p[0];                                                           \
        int full = s[0] == sizeof(type);                                                            \
        if (full && FULL(1) && FULL(2))                                                             \
            for (int64_t i = 0; i < n; i++) { REAL x = r1[i], y = r2[i]; r0[i] = value; }           \
        else if (full && FULL(1) && s[2] == 0) {                                                    \
            REAL y = *r2;                                                                           \
            for (int64_t i = 0; i < n; i++) { REAL x = r1[i]; r0[i] = value; }                      \
        } else                                                                                      \
            for (int64_t i = 0; i < n; i++) { REAL x = AT(REAL, 1, i), y = AT(REAL, 2, i); AT(type, 0, i) = value; } \
        break;                                                                                      \
    }

/* One row of n entries: arrays at p, with distances s. */
static void run_row(int64_t code, int64_t n, char **p, const int64_t *s) {
    switch (code) {
    case COPY: UNARY(x)
    case NEG: UNARY(-x)
    case EXP: UNARY(exp(x))
    case LOG: UNARY(log(x))
    case LOG1P: UNARY(log1p(x))
    case SQRT: UNARY(sqrt(x))
    case TANH: UNARY(tanh(x))
    case SIGMOID: UNARY(1 / (1 + exp(-x)))
    case ABS: UNARY(fabs(x))
    case SIN: UNARY(sin(x))
    case COS: UNARY(cos(x))
    case ADD: BINARY(REAL, x + y)
    case SUB: BINARY(REAL, x - y)
    case MUL: BINARY(REAL, x * y)
    case DIV: BINARY(REAL, x / y)
    case POW: BINARY(REAL, pow(x, y))
    case MAXIMUM: BINARY(REAL, (x > y || x != x) ? x : y)
    case MINIMUM: BINARY(REAL, (x < y || x != x) ? x : y)
    case GE: BINARY(uint8_t, x >= y)
    case GT: BINARY(uint8_t, x > y)
    case LE: BINARY(uint8_t, x <= y)
    case LT: BINARY(uint8_t, x < y)
    case EQ: BINARY(uint8_t, x == y)
    case NE: BINARY(uint8_t, x != y)
    case ADDCMUL: {
        ROW(0), *restrict r1 = (REAL *)p[1], *restrict r2 = (REAL *)p[2], *restrict r3 = (REAL *)p[3];
        if (FULL(0) && FULL(1) && FULL(2) && FULL(3))
            for (int64_t i = 0; i < n; i++) r0[i] = r1[i] + r2[i] * r3[i];
        else if (FULL(0) && FULL(1) && FULL(2) && s[3] == 0) {
            REAL z = *r3;
            for (int64_t i = 0; i < n; i++) r0[i] = r1[i] + r2[i] * z;
        } else
            for (int64_t i = 0; i < n; i++) AT(REAL, 0, i) = AT(REAL, 1, i) + AT(REAL, 2, i) * AT(REAL, 3, i);
        break;
    }
    case WHERE:
        for (int64_t i = 0; i < n; i++) AT(REAL, 0, i) = AT(uint8_t, 1, i) ? AT(REAL, 2, i) : AT(REAL, 3, i);
        break;
    /* The result of the following is added to, or compared with, what was there. */
    case SUM: {
        ROW(0), *restrict r1 = (REAL *)p[1];
        if (FULL(0) && FULL(1))
            for (int64_t i = 0; i < n; i++) r0[i] += r1[i];
        else
            for (int64_t i = 0; i < n; i++) AT(REAL, 0, i) += AT(REAL, 1, i);
        break;
    }
    case MAX: {
        ROW(0), *restrict r1 = (REAL *)p[1];
        if (FULL(0) && FULL(1))
            for (int64_t i = 0; i < n; i++) r0[i] = (r1[i] > r0[i] || r1[i] != r1[i]) ? r1[i] : r0[i];
        else
            for (int64_t i = 0; i < n; i++) {
                REAL x = AT(REAL, 1, i);
                if (x > AT(REAL, 0, i) || x != x) AT(REAL, 0, i) = x;
            }
        break;
    }
    case DOT: {
        ROW(0), *restrict r1 = (REAL *)p[1], *restrict r2 = (REAL *)p[2];
        if (FULL(0) && FULL(1) && FULL(2))
            for (int64_t i = 0; i < n; i++) r0[i] += r1[i] * r2[i];
        else
            for (int64_t i = 0; i < n; i++) AT(REAL, 0, i) += AT(REAL, 1, i) * AT(REAL, 2, i);
        break;
    }
    }
}

/* All rows of an operation. */
static void run_dims(int64_t code, int64_t dims, int64_t arrays, char **p, const int64_t *shape) {
    if (dims == 1) {
        run_row(code, shape[0], p, shape + 1);
        return;
    }
    char *q[MOST_ARRAYS];
    for (int64_t k = 0; k < arrays; k++) q[k] = p[k];
    for (int64_t i = 0; i < shape[0]; i++) {
        run_dims(code, dims - 1, arrays, q, shape + 1 + arrays);
        for (int64_t k = 0; k < arrays; k++) q[k] += shape[1 + k];
    }
}

void run_operations(const int64_t *word, const int64_t *end) {
    while (word < end) {
        int64_t code = word[0], dims = word[1], arrays = word[2];
        const int64_t *shape = word + 3 + arrays;
        run_dims(code, dims, arrays, (char **)(word + 3), shape);
        word = shape + dims * (1 + arrays);
    }
}

/* Host arithmetic on the store: the AdamW update in one pass, and the passes around it.

   Plain C11 and OpenMP, no Python or torch ABI: native.py loads it, kernel.py says what each entry
   computes. An entry works on n contiguous elements with num_threads threads and returns when all
   of them are done. Its arrays must not overlap. Any alignment is right, 64 bytes is fastest.

   Same bits everywhere: IEEE additions, multiplications, divisions and square roots in the order
   written here, never fused and never reassociated, so every instruction set, compiler and number
   of threads gives one result, and torch_kernel.py gives it too. Threads work with denormals on and
   rounding to nearest, whatever the process has set, and put the control register back.

   Measured (two cores, Sapphire Rapids): the update moves bytes as fast as the same loop with no
   arithmetic. Stores past the cache halve its speed, because each line was just read. */

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "this file promises the same bits everywhere: no fast-math, no excess precision (x87)"
#endif
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF /* gcc knows only -ffp-contract=off, which setup.py passes */
#endif

/* Raised when an entry's arguments or results change; native.py refuses any other number. */
#define INTERFACE 1

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* ---- instruction sets: numbered as in native.py ---------------------------------------------- */

enum { BASELINE, AVX2, AVX512 };

#ifdef __x86_64__
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else /* the baseline is the vector unit: NEON on aarch64 */
#define TARGET_AVX2
#define TARGET_AVX512
#endif

EXPORT int megatrain_interface(void) { return INTERFACE; }

#ifndef _OPENMP
EXPORT int megatrain_one_thread; /* native.py looks for this name: num_threads has no effect */
#endif

EXPORT int megatrain_supports(int instruction_set) {
#ifdef __x86_64__
    if (instruction_set == AVX2) return __builtin_cpu_supports("avx2") != 0;
    if (instruction_set == AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return instruction_set == BASELINE;
}

/* ---- the control register of floating point --------------------------------------------------- */

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned fp_control;
#define FP_IEEE 0x1f80u /* exceptions masked, round to nearest even, neither FTZ nor DAZ */
INLINE fp_control fp_read(void) { return _mm_getcsr(); }
INLINE void fp_write(fp_control control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
typedef uint64_t fp_control;
#define FP_IEEE 0u /* round to nearest even, no flush to zero */
INLINE fp_control fp_read(void) {
    fp_control control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
}
INLINE void fp_write(fp_control control) { __asm__ volatile("msr fpcr, %0" : : "r"(control)); }
#else
typedef int fp_control;
#define FP_IEEE 0
INLINE fp_control fp_read(void) { return FP_IEEE; }
INLINE void fp_write(fp_control control) { (void)control; }
#endif

/* ---- jobs: a loop over a range, once per instruction set, shared out among threads ------------ */

/* AdamWScalars of kernel.py, field by field. */
typedef struct {
    float grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, denom_scale, eps, step_size;
} scalars;

/* Arguments of all jobs; each reads the fields it needs. */
typedef struct {
    void *weight;       /* bf16 `hi` of a split master, or fp32 */
    int16_t *lo;        /* rest of a split master */
    float *m, *v;       /* moments */
    const void *source; /* gradient */
    double *sums;       /* one per chunk */
    double *triad[3];
    scalars s;
} job;

typedef void range_loop(const job *j, size_t begin, size_t end);

/* Defines the table `name` of `body` compiled for each instruction set. Not inlined, so that no
   arithmetic moves past the writes of the control register around the call. */
#define LOOP __attribute__((noinline)) static void
#define FOR_EACH_TARGET(name, body)                                                         \
    LOOP name##_baseline(const job *j, size_t begin, size_t end) { body; }                  \
    TARGET_AVX2 LOOP name##_avx2(const job *j, size_t begin, size_t end) { body; }          \
    TARGET_AVX512 LOOP name##_avx512(const job *j, size_t begin, size_t end) { body; }      \
    static range_loop *const name[] = {name##_baseline, name##_avx2, name##_avx512};

/* Elements that one thread takes at a time, and that one partial sum of a squared norm covers. */
#define CHUNK ((ptrdiff_t)65536)

/* Threads take chunks as they get free: cores may differ, and other work may hold some of them. */
static void run(range_loop *loop, const job *j, size_t n, int num_threads) {
    ptrdiff_t end = (ptrdiff_t)n;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (end > CHUNK)
    for (ptrdiff_t begin = 0; begin < end; begin += CHUNK) {
        fp_control before = fp_read();
        fp_write(FP_IEEE);
        loop(j, (size_t)begin, (size_t)(end - begin < CHUNK ? end : begin + CHUNK));
        fp_write(before);
    }
}

/* ---- one element ------------------------------------------------------------------------------ */

INLINE float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }

/* Split master: hi is rounded half up, so that lo, the signed rest, always fits 16 bits. */
INLINE float join(uint16_t hi, int16_t lo) {
    return as_float(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}
INLINE uint16_t hi_of(float x) { return (uint16_t)((as_bits(x) + 0x8000u) >> 16); }
INLINE int16_t lo_of(float x) { return (int16_t)(uint16_t)as_bits(x); }

/* A moment below the smallest normal number counts as zero. It is too small to move a weight, and
   without this the moments of an idle row (a rare token, an idle expert) decay to denormals that
   rounding then holds for ever, where every step takes seven to fifteen times as long. */
INLINE float normal_or_zero(float x) { return as_bits(x) & 0x7f800000u ? x : 0.0f; }

/* m moves by a difference of products: g - m could overflow, this cannot (beta1 >= 0.5). */
INLINE float adamw(float p, float *m, float *v, float g, const scalars *s) {
    g = g * s->grad_scale;
    *m = normal_or_zero(*m + (g * s->one_minus_beta1 - *m * s->one_minus_beta1));
    *v = normal_or_zero(*v * s->beta2 + (g * s->one_minus_beta2) * g);
    float denom = __builtin_sqrtf(*v) * s->denom_scale + s->eps;
    return p * s->decay - (*m / denom) * s->step_size;
}

/* ---- update ----------------------------------------------------------------------------------- */

enum { FP32_GRAD, BF16_GRAD };
enum { FP32_WEIGHT, SPLIT_WEIGHT };

INLINE void update_range(const job *j, size_t begin, size_t end, int weight_kind, int grad_kind) {
    float *restrict weight = j->weight;
    uint16_t *restrict hi = j->weight;
    int16_t *restrict lo = j->lo;
    float *restrict m = j->m;
    float *restrict v = j->v;
    const float *restrict grad_fp32 = j->source;
    const uint16_t *restrict grad_bf16 = j->source;
    const scalars s = j->s;
#pragma omp simd
    for (size_t i = begin; i < end; i++) {
        float g = grad_kind == BF16_GRAD ? from_bf16(grad_bf16[i]) : grad_fp32[i];
        float p = weight_kind == SPLIT_WEIGHT ? join(hi[i], lo[i]) : weight[i];
        p = adamw(p, &m[i], &v[i], g, &s);
        if (weight_kind == SPLIT_WEIGHT) {
            hi[i] = hi_of(p);
            lo[i] = lo_of(p);
        } else {
            weight[i] = p;
        }
    }
}

/* Asks for the lines that hold `count` elements of `size` bytes from element `i` on. */
INLINE void prefetch(const void *array, size_t i, size_t count, size_t size) {
    for (size_t line = 0; line < count * size; line += 64)
        __builtin_prefetch((const char *)array + i * size + line);
}

/* The hardware's own prefetch falls behind on so many streams; asking this far ahead gained 5 to
   10 %. Past the end of an array a prefetch does nothing. LINES is whole lines of every kind. */
#define AHEAD 512
#define LINES 64

INLINE void update(const job *j, size_t begin, size_t end, int weight_kind, int grad_kind) {
    for (; begin + LINES <= end; begin += LINES) {
        prefetch(j->weight, begin + AHEAD, LINES, weight_kind == SPLIT_WEIGHT ? 2 : 4);
        if (weight_kind == SPLIT_WEIGHT) prefetch(j->lo, begin + AHEAD, LINES, 2);
        prefetch(j->m, begin + AHEAD, LINES, 4);
        prefetch(j->v, begin + AHEAD, LINES, 4);
        prefetch(j->source, begin + AHEAD, LINES, grad_kind == BF16_GRAD ? 2 : 4);
        update_range(j, begin, begin + LINES, weight_kind, grad_kind);
    }
    update_range(j, begin, end, weight_kind, grad_kind);
}

FOR_EACH_TARGET(update_fp32, update(j, begin, end, FP32_WEIGHT, FP32_GRAD))
FOR_EACH_TARGET(update_split_fp32, update(j, begin, end, SPLIT_WEIGHT, FP32_GRAD))
FOR_EACH_TARGET(update_split_bf16, update(j, begin, end, SPLIT_WEIGHT, BF16_GRAD))

/* `lo` is null for an fp32 weight, whose gradient must be fp32. */
EXPORT void megatrain_adamw(int instruction_set, int num_threads, size_t n, void *weight,
                            int16_t *lo, float *m, float *v, const void *grad, int grad_is_bf16,
                            const scalars *s) {
    job j = {.weight = weight, .lo = lo, .m = m, .v = v, .source = grad, .s = *s};
    range_loop *const *loops = !lo ? update_fp32 : grad_is_bf16 ? update_split_bf16
                                                                : update_split_fp32;
    run(loops[instruction_set], &j, n, num_threads);
}

/* ---- squared norm ----------------------------------------------------------------------------- */

/* Order of the sum: a chunk is rows of ROW elements, the last row padded with zeros. Rows are added
   up element by element, then the row is folded in half until one number is left. Squares of fp32
   are exact in double, so only these additions round. */
#define ROW 1024

INLINE double square(float x) { return (double)x * (double)x; }

INLINE void add_squares(double *restrict sums, const job *j, size_t begin, size_t end,
                        int grad_kind) {
    const float *restrict grad_fp32 = j->source;
    const uint16_t *restrict grad_bf16 = j->source;
#pragma omp simd
    for (size_t i = begin; i < end; i++)
        sums[i - begin] +=
            square(grad_kind == BF16_GRAD ? from_bf16(grad_bf16[i]) : grad_fp32[i]);
}

INLINE void square_sum(const job *j, size_t begin, size_t end, int grad_kind) {
    double sums[ROW] = {0};
    size_t row = begin;
    for (; row + ROW <= end; row += ROW) add_squares(sums, j, row, row + ROW, grad_kind);
    add_squares(sums, j, row, end, grad_kind);
    for (size_t width = ROW / 2; width > 0; width /= 2)
#pragma omp simd
        for (size_t i = 0; i < width; i++) sums[i] += sums[i + width];
    j->sums[begin / CHUNK] = sums[0];
}

FOR_EACH_TARGET(square_sum_fp32, square_sum(j, begin, end, FP32_GRAD))
FOR_EACH_TARGET(square_sum_bf16, square_sum(j, begin, end, BF16_GRAD))

/* Writes one sum per chunk. A sum is finite exactly when its elements are: squares of finite fp32
   numbers do not overflow a double, nor do sums of fewer than 2^768 of them. */
EXPORT void megatrain_square_sums(int instruction_set, int num_threads, size_t n, const void *grad,
                                  int grad_is_bf16, double *sums) {
    job j = {.source = grad, .sums = sums};
    range_loop *const *loops = grad_is_bf16 ? square_sum_bf16 : square_sum_fp32;
    run(loops[instruction_set], &j, n, num_threads);
}

/* ---- what the memory can do ------------------------------------------------------------------- */

INLINE void triad(const job *j, size_t begin, size_t end) {
    double *restrict a = j->triad[0];
    const double *restrict b = j->triad[1];
    const double *restrict c = j->triad[2];
#pragma omp simd
    for (size_t i = begin; i < end; i++) a[i] = b[i] + 3.0 * c[i];
}

FOR_EACH_TARGET(triads, triad(j, begin, end))

/* a = b + 3 c with ordinary stores: 24 bytes an element as counted by custom, and 8 more that the
   hardware reads before it writes a. */
EXPORT void megatrain_triad(int instruction_set, int num_threads, size_t n, double *a, double *b,
                            double *c) {
    job j = {.triad = {a, b, c}};
    run(triads[instruction_set], &j, n, num_threads);
}

/* Host arithmetic on the store: the AdamW update in one pass, Muon's two passes, and those around.

   Plain C11 and OpenMP, no Python or torch ABI: native.py loads it, kernel.py says what each entry
   computes. An entry works on n contiguous elements with num_threads threads and returns when all
   of them are done. Its arrays must not overlap. Any alignment is right, 64 bytes is fastest.

   Moments are fp32, bf16, or codes of 8 bits with a scale for SHARED elements. In fp32 the update is
   that of AdamWScalars, element by element. The other two round stochastically, and their update is
   that of FoldedScalars: fewer operations, because with fewer bytes to move these would hold it up.

   Same bits everywhere: IEEE additions, multiplications, divisions and square roots in the order
   written here, never fused and never reassociated, so every instruction set, compiler and number
   of threads gives one result, and torch_kernel.py gives it too. Threads work with denormals on and
   rounding to nearest, whatever the process has set, and put the control register back.

   Measured (two cores, Sapphire Rapids): with moments in fp32 the update moves bytes as fast as the
   same loop with no arithmetic. Stores past the cache halve its speed, because each line was just
   read. With moments in bf16 roots and quotients take as long as the bytes, with moments in 8 bits
   the codes take longer than either. */

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
#define INTERFACE 5

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* ---- instruction sets: numbered as in native.py ---------------------------------------------- */

enum { BASELINE, AVX2, AVX512 };

#ifdef __x86_64__
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
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

/* FoldedScalars of kernel.py, field by field. */
typedef struct {
    float decay, beta1, grad_to_m, beta2, grad_to_v, eps, step_size;
} folded;

/* Moments as a store keeps them (state_codes.py). */
typedef struct {
    void *m, *v;              /* fp32, bf16, or codes of 8 bits */
    float *m_scale, *v_scale; /* of SHARED codes each */
    uint64_t stream, first;   /* of the random bits (rounding.py) */
} moments;

/* Arguments of all jobs; each reads the fields it needs. */
typedef struct {
    void *weight;       /* bf16 `hi` of a split master, or fp32 */
    int16_t *lo;        /* rest of a split master */
    moments states;
    const void *source; /* gradient */
    void *grad;         /* a gradient that is written over */
    float rates[3];     /* of a momentum or a descent, in the order of their arguments */
    double *sums;       /* one per chunk */
    double *triad[3];
    scalars s;
    folded f;
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

/* Elements that share a key, and in 8 bits a scale. Divides CHUNK. */
#define SHARED 256

/* Threads take chunks as they get free: cores may differ, and other work may hold some of them. */
static void run(range_loop *loop, const job *j, size_t n, int num_threads) {
    ptrdiff_t end = (ptrdiff_t)n;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (end > CHUNK)
    for (ptrdiff_t begin = 0; begin < end; begin += CHUNK) {
        const size_t stop = (size_t)(end - begin < CHUNK ? end : begin + CHUNK);
        fp_control before = fp_read();
        fp_write(FP_IEEE);
        loop(j, (size_t)begin, stop);
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

/* ---- update with moments in fp32 --------------------------------------------------------------- */

enum { FP32_GRAD, BF16_GRAD };
enum { FP32_WEIGHT, SPLIT_WEIGHT };
enum { FP32_STATE, BF16_STATE, CODED_STATE }; /* numbered as in native.py */

typedef struct {
    int weight, grad, state;
} kinds;

INLINE void update_range(const job *j, size_t begin, size_t end, kinds kind) {
    float *restrict weight = j->weight;
    uint16_t *restrict hi = j->weight;
    int16_t *restrict lo = j->lo;
    float *restrict m = j->states.m;
    float *restrict v = j->states.v;
    const float *restrict grad_fp32 = j->source;
    const uint16_t *restrict grad_bf16 = j->source;
    const scalars s = j->s;
#pragma omp simd
    for (size_t i = begin; i < end; i++) {
        float g = kind.grad == BF16_GRAD ? from_bf16(grad_bf16[i]) : grad_fp32[i];
        float p = kind.weight == SPLIT_WEIGHT ? join(hi[i], lo[i]) : weight[i];
        p = adamw(p, &m[i], &v[i], g, &s);
        if (kind.weight == SPLIT_WEIGHT) {
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

/* The hardware's own prefetch falls behind on so many streams; asking some way ahead gained 5 to
   10 %. Past the end of an array a prefetch does nothing. */
INLINE void prefetch_all(const job *j, size_t i, size_t count, kinds kind) {
    size_t state_size = kind.state == FP32_STATE ? 4 : kind.state == BF16_STATE ? 2 : 1;
    prefetch(j->weight, i, count, kind.weight == SPLIT_WEIGHT ? 2 : 4);
    if (kind.weight == SPLIT_WEIGHT) prefetch(j->lo, i, count, 2);
    prefetch(j->states.m, i, count, state_size);
    prefetch(j->states.v, i, count, state_size);
    prefetch(j->source, i, count, kind.grad == BF16_GRAD ? 2 : 4);
}

#define LINES 64 /* elements: whole lines of every kind */

INLINE void update(const job *j, size_t begin, size_t end, kinds kind) {
    for (; begin + LINES <= end; begin += LINES) {
        prefetch_all(j, begin + 512, LINES, kind);
        update_range(j, begin, begin + LINES, kind);
    }
    update_range(j, begin, end, kind);
}

/* ---- random bits: rounding.py says which ------------------------------------------------------- */

/* The rest of this file works on SHARED elements as PAIRS of neighbors, GROUP pairs at a time. */
#define PAIRS (SHARED / 2)
#define GROUP 16
#define NUM_GROUPS (PAIRS / GROUP)

/* The bits of an element are those of its place in a group XOR those of its group. Each is shifted
   to where its kind of state adds it. */
typedef struct {
    uint32_t m[2 * GROUP + NUM_GROUPS], v[2 * GROUP + NUM_GROUPS];
} draws;

INLINE void draw(draws *restrict d, const moments *states, size_t begin, kinds kind) {
    uint64_t x = states->stream + ((states->first + begin) / SHARED) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x = x ^ (x >> 31);
    uint32_t lower = (uint32_t)x, upper = (uint32_t)(x >> 32);
#pragma omp simd
    for (uint32_t i = 0; i < 2 * GROUP + NUM_GROUPS; i++) {
        uint32_t y = lower + i;
        y = (y ^ (y >> 16)) * 0x7feb352du;
        y = (y ^ (y >> 15) ^ upper) * 0x846ca68bu;
        y = y ^ (y >> 16);
        d->m[i] = kind.state == CODED_STATE ? y << 4 & 0xffff0u : y & 0xffffu;
        d->v[i] = kind.state == CODED_STATE ? y >> 13 & 0x7fff8u : y >> 16;
    }
}

/* ---- pairs: two neighbors in 32 bits ---------------------------------------------------------- */

/* Vectors have lanes of 32 bits throughout: to widen and to pack halves costs a shift and a mask,
   and no permutation. The first of a pair (e = 0) is the lower half. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs are read as little-endian"
#endif
typedef uint32_t __attribute__((may_alias)) pair;

INLINE float bf16_of(pair x, int e) { return as_float(e ? x & 0xffff0000u : x << 16); }
INLINE float join_of(pair hi, pair lo, int e) {
    int32_t rest = (int32_t)(e ? lo : lo << 16) >> 16;
    return as_float((e ? hi & 0xffff0000u : hi << 16) + (uint32_t)rest);
}
INLINE pair upper_halves(uint32_t first, uint32_t second) {
    return (first >> 16) | (second & 0xffff0000u);
}
INLINE pair lower_halves(uint32_t first, uint32_t second) {
    return (first & 0xffffu) | (second << 16);
}

/* ---- codes of 8 bits: state_codes.py says which ------------------------------------------------ */

/* Two codes are in the lower half of a pair. */
#define M_ZERO (1024u << 20) /* the lower 8 bits of 1024 are free for a code */
#define M_OFFSET 2.0f        /* M_ZERO as a number */
#define M_LARGEST (0x1.ep16f - M_OFFSET)
#define M_HALF_STEP 8u /* of the random bits, which end above it */

INLINE float decode_m(pair codes, int e, float scale) {
    uint32_t bits = ((e ? codes << 12 : codes << 20) & 0x7f00000u) | M_ZERO;
    float x = (as_float(bits) - M_OFFSET) * scale;
    return as_float(as_bits(x) | ((e ? codes << 16 : codes << 24) & 0x80000000u));
}
INLINE uint32_t encode_m(float m, float inverse, uint32_t random) {
    float x = __builtin_fabsf(m) * inverse + M_OFFSET;
    return (as_bits(x) + random) >> 20 | (as_bits(m) >> 24 & 0x80u); /* lower 8 bits */
}

#define V_FINE (1777 << 19)
#define V_COARSE (793 << 19)

INLINE float decode_v(pair codes, int e, float scale) {
    int32_t x = (int32_t)((e ? codes << 11 : codes << 19) & 0x7f80000u);
    int32_t fine = x + V_FINE, coarse = x + x + 2 * V_COARSE;
    return as_float((uint32_t)(fine < coarse ? fine : coarse)) * scale;
}
INLINE uint32_t encode_v(float v, float inverse, uint32_t random) {
    int32_t bits = (int32_t)as_bits(v * inverse);
    int32_t fine = bits - (V_FINE - 4), coarse = (bits >> 1) - (V_COARSE - 4);
    int32_t q = ((fine > coarse ? fine : coarse) + (int32_t)random) >> 19;
    return (uint32_t)(q > 0 ? q : 0);
}

/* ---- update with moments in bf16 or in 8 bits -------------------------------------------------- */

/* What a block of SHARED elements is worked on with; it stays in the first cache. With moments in
   8 bits one loop opens the codes and updates, and a second closes them: the scales are known only
   when the largest new moments are. */
typedef struct {
    draws random;
    pair m_codes[PAIRS], v_codes[PAIRS]; /* two in each */
    float m_scale, v_scale;              /* of the codes before the update */
    float m[2][PAIRS], v[2][PAIRS];      /* new moments by place in the pair */
    float grad_fp32[SHARED];             /* written by limit_grad */
    uint16_t grad_bf16[SHARED];
} block;

/* A gradient beyond this counts as this: its square would not fit v. The largest of a block decides
   once: with a comparison in each element, bf16 takes 15 % longer with AVX2. */
#define LARGEST_GRAD 0x1p63f

INLINE float largest_grad(const void *grad, kinds kind) {
    const uint32_t *restrict fp32 = grad;
    const uint16_t *restrict bf16 = grad;
    int32_t largest = 0;
    int16_t largest_half = 0;
    if (kind.grad == FP32_GRAD)
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < SHARED; i++) {
            int32_t x = (int32_t)(fp32[i] & 0x7fffffffu);
            largest = x > largest ? x : largest;
        }
    else
#pragma omp simd reduction(max : largest_half)
        for (int i = 0; i < SHARED; i++) {
            int16_t x = (int16_t)(bf16[i] & 0x7fffu);
            largest_half = x > largest_half ? x : largest_half;
        }
    return as_float((uint32_t)largest + ((uint32_t)largest_half << 16));
}

__attribute__((noinline, cold)) static const void *limit_grad(block *b, const void *grad,
                                                              int grad_kind) {
    for (int i = 0; i < SHARED; i++) {
        float g = grad_kind == FP32_GRAD ? ((const float *)grad)[i]
                                         : from_bf16(((const uint16_t *)grad)[i]);
        g = g > LARGEST_GRAD ? LARGEST_GRAD : g < -LARGEST_GRAD ? -LARGEST_GRAD : g;
        b->grad_fp32[i] = g;
        b->grad_bf16[i] = (uint16_t)(as_bits(g) >> 16);
    }
    return grad_kind == FP32_GRAD ? (const void *)b->grad_fp32 : b->grad_bf16;
}

INLINE void open_codes(const job *j, size_t begin, block *restrict b) {
    const uint16_t *restrict m = (const uint16_t *)((const uint8_t *)j->states.m + begin);
    const uint16_t *restrict v = (const uint16_t *)((const uint8_t *)j->states.v + begin);
#pragma omp simd
    for (int i = 0; i < PAIRS; i++) b->m_codes[i] = m[i];
#pragma omp simd
    for (int i = 0; i < PAIRS; i++) b->v_codes[i] = v[i];
    b->m_scale = j->states.m_scale[begin / SHARED];
    b->v_scale = j->states.v_scale[begin / SHARED];
}

/* The largest magnitude: magnitudes of fp32 are ordered as their bits are. */
INLINE float largest_moment(float moment[2][PAIRS]) {
    int32_t bits = 0;
#pragma omp simd reduction(max : bits)
    for (int i = 0; i < PAIRS; i++) {
        int32_t first = (int32_t)(as_bits(moment[0][i]) & 0x7fffffffu);
        int32_t second = (int32_t)(as_bits(moment[1][i]) & 0x7fffffffu);
        int32_t larger = first > second ? first : second;
        bits = larger > bits ? larger : bits;
    }
    return as_float((uint32_t)bits);
}

/* Encodes the new moments of a block, relative to the largest of them. */
INLINE void close_codes(const job *j, size_t begin, block *restrict b) {
    const draws random = b->random;
    const float m_scale = normal_or_zero(largest_moment(b->m) / M_LARGEST);
    const float v_scale = normal_or_zero(largest_moment(b->v));
    const float m_inverse = m_scale > 0 ? 1 / m_scale : 0;
    const float v_inverse = v_scale > 0 ? 1 / v_scale : 0;
    for (int group = 0; group < NUM_GROUPS; group++) {
        uint32_t m_group = random.m[2 * GROUP + group] | M_HALF_STEP;
        uint32_t v_group = random.v[2 * GROUP + group];
#pragma omp simd
        for (int lane = 0; lane < GROUP; lane++) {
            int i = group * GROUP + lane;
            uint32_t m[2], v[2];
            for (int e = 0; e < 2; e++) {
                m[e] = encode_m(b->m[e][i], m_inverse, random.m[e * GROUP + lane] ^ m_group);
                v[e] = encode_v(b->v[e][i], v_inverse, random.v[e * GROUP + lane] ^ v_group);
            }
            b->m_codes[i] = (m[0] & 0xffu) | m[1] << 8;
            b->v_codes[i] = v[0] | v[1] << 8;
        }
    }
    uint16_t *restrict m = (uint16_t *)((uint8_t *)j->states.m + begin);
    uint16_t *restrict v = (uint16_t *)((uint8_t *)j->states.v + begin);
#pragma omp simd
    for (int i = 0; i < PAIRS; i++) m[i] = (uint16_t)b->m_codes[i];
#pragma omp simd
    for (int i = 0; i < PAIRS; i++) v[i] = (uint16_t)b->v_codes[i];
    j->states.m_scale[begin / SHARED] = m_scale;
    j->states.v_scale[begin / SHARED] = v_scale;
}

INLINE uint32_t bf16_bits(float x, uint32_t random) {
    uint32_t bits = as_bits(x) + random;
    return bits & 0x7f800000u ? bits : 0;
}

/* The update of AdamW with constants multiplied beforehand, and one division for two elements. In
   8 bits the new moments stay in the block until close_codes. */
INLINE void update_pairs(const job *j, size_t begin, const void *grad, block *restrict b,
                         kinds kind) {
    pair *restrict hi = (pair *)((uint16_t *)j->weight + begin);
    pair *restrict lo = (pair *)(j->lo + begin);
    float *restrict weight = (float *)j->weight + begin;
    int coded = kind.state == CODED_STATE;
    pair *restrict ms = coded ? b->m_codes : (pair *)((uint16_t *)j->states.m + begin);
    pair *restrict vs = coded ? b->v_codes : (pair *)((uint16_t *)j->states.v + begin);
    const draws random = b->random;
    const float m_scale = b->m_scale, v_scale = b->v_scale;
    const pair *restrict grad_bf16 = grad;
    const float *restrict grad_fp32 = grad;
    const folded f = j->f;
    for (int group = 0; group < NUM_GROUPS; group++) {
        uint32_t m_group = random.m[2 * GROUP + group];
        uint32_t v_group = random.v[2 * GROUP + group];
        prefetch_all(j, begin + 1024 + (size_t)group * 2 * GROUP, 2 * GROUP, kind);
#pragma omp simd
        for (int lane = 0; lane < GROUP; lane++) {
            int i = group * GROUP + lane;
            float p[2], m[2], v[2], d[2];
            uint32_t m_bits[2], v_bits[2];
            for (int e = 0; e < 2; e++) {
                float g = kind.grad == BF16_GRAD ? bf16_of(grad_bf16[i], e) : grad_fp32[2 * i + e];
                p[e] = kind.weight == SPLIT_WEIGHT ? join_of(hi[i], lo[i], e) : weight[2 * i + e];
                m[e] = coded ? decode_m(ms[i], e, m_scale) : bf16_of(ms[i], e);
                v[e] = coded ? decode_v(vs[i], e, v_scale) : bf16_of(vs[i], e);
                m[e] = m[e] * f.beta1 + g * f.grad_to_m;
                v[e] = v[e] * f.beta2 + (g * f.grad_to_v) * (g * f.grad_to_v);
                d[e] = __builtin_sqrtf(v[e]) + f.eps;
                if (coded) {
                    b->m[e][i] = m[e];
                    b->v[e][i] = v[e];
                } else {
                    m_bits[e] = bf16_bits(m[e], random.m[e * GROUP + lane] ^ m_group);
                    v_bits[e] = bf16_bits(v[e], random.v[e * GROUP + lane] ^ v_group);
                }
            }
            float r = f.step_size / (d[0] * d[1]);
            p[0] = p[0] * f.decay - (m[0] * r) * d[1];
            p[1] = p[1] * f.decay - (m[1] * r) * d[0];
            if (!coded) {
                ms[i] = upper_halves(m_bits[0], m_bits[1]);
                vs[i] = upper_halves(v_bits[0], v_bits[1]);
            }
            if (kind.weight == SPLIT_WEIGHT) {
                uint32_t first = as_bits(p[0]), second = as_bits(p[1]);
                hi[i] = upper_halves(first + 0x8000u, second + 0x8000u);
                lo[i] = lower_halves(first, second);
            } else {
                weight[2 * i] = p[0];
                weight[2 * i + 1] = p[1];
            }
        }
    }
}

INLINE void update_blocks(const job *j, size_t begin, size_t end, kinds kind) {
    block b;
    for (; begin < end; begin += SHARED) {
        const void *grad = (const char *)j->source + begin * (kind.grad == BF16_GRAD ? 2 : 4);
        if (largest_grad(grad, kind) > LARGEST_GRAD) grad = limit_grad(&b, grad, kind.grad);
        draw(&b.random, &j->states, begin, kind);
        if (kind.state == CODED_STATE) open_codes(j, begin, &b);
        update_pairs(j, begin, grad, &b, kind);
        if (kind.state == CODED_STATE) close_codes(j, begin, &b);
    }
}

/* ---- the entry --------------------------------------------------------------------------------- */

/* The tables of one kind of state: an fp32 weight has an fp32 gradient. */
#define UPDATES(name, function, state)                                                \
    FOR_EACH_TARGET(name##_fp32,                                                      \
                    function(j, begin, end, (kinds){FP32_WEIGHT, FP32_GRAD, state}))  \
    FOR_EACH_TARGET(name##_split_fp32,                                                \
                    function(j, begin, end, (kinds){SPLIT_WEIGHT, FP32_GRAD, state})) \
    FOR_EACH_TARGET(name##_split_bf16,                                                \
                    function(j, begin, end, (kinds){SPLIT_WEIGHT, BF16_GRAD, state})) \
    static range_loop *const *const name[] = {name##_fp32, name##_split_fp32, name##_split_bf16};

UPDATES(update_fp32_state, update, FP32_STATE)
UPDATES(update_bf16_state, update_blocks, BF16_STATE)
UPDATES(update_coded_state, update_blocks, CODED_STATE)

static range_loop *const *const *const updates[] = {
    [FP32_STATE] = update_fp32_state,
    [BF16_STATE] = update_bf16_state,
    [CODED_STATE] = update_coded_state,
};

/* `lo` is null for an fp32 weight, whose gradient must be fp32. n is a multiple of SHARED unless
   moments are fp32. */
EXPORT void megatrain_adamw(int instruction_set, int num_threads, size_t n, void *weight,
                            int16_t *lo, int state, const moments *states, const void *grad,
                            int grad_is_bf16, const scalars *s, const folded *f) {
    job j = {.weight = weight, .lo = lo, .states = *states, .source = grad, .s = *s, .f = *f};
    range_loop *const *loops = updates[state][!lo ? 0 : grad_is_bf16 ? 2 : 1];
    run(loops[instruction_set], &j, n, num_threads);
}

/* ---- Muon: a momentum before the device, a step behind it -------------------------------------- */

/* Moves the momentum of up to SHARED elements, and writes the direction over their gradient. */
INLINE void momentum_block(const job *j, size_t begin, int count, kinds kind) {
    float *restrict grad_fp32 = (float *)j->grad + begin;
    uint16_t *restrict grad_bf16 = (uint16_t *)j->grad + begin;
    float *restrict m_fp32 = (float *)j->states.m + begin;
    uint16_t *restrict m_bf16 = (uint16_t *)j->states.m + begin;
    uint8_t *restrict m_codes = (uint8_t *)j->states.m + begin;
    const float grad_scale = j->rates[0];
    const double pull = j->rates[1], lag = j->rates[2];
    const float scale = kind.state == CODED_STATE ? j->states.m_scale[begin / SHARED] : 0.0f;
    float moved[SHARED];
#pragma omp simd
    for (int i = 0; i < count; i++) {
        float g = kind.grad == BF16_GRAD ? from_bf16(grad_bf16[i]) : grad_fp32[i];
        float m = kind.state == FP32_STATE   ? m_fp32[i]
                  : kind.state == BF16_STATE ? from_bf16(m_bf16[i])
                                             : decode_m(m_codes[i], 0, scale);
        g = g * grad_scale;
        g = g > LARGEST_GRAD ? LARGEST_GRAD : g < -LARGEST_GRAD ? -LARGEST_GRAD : g;
        m = (float)((double)m + (double)(g - m) * pull);
        float ahead = (float)((double)m - (double)(m - g) * lag);
        moved[i] = m;
        if (kind.grad == BF16_GRAD) { /* to the nearest, ties to even */
            uint32_t bits = as_bits(ahead);
            grad_bf16[i] = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
        } else {
            grad_fp32[i] = ahead;
        }
    }
    if (kind.state == FP32_STATE) {
#pragma omp simd
        for (int i = 0; i < count; i++) m_fp32[i] = normal_or_zero(moved[i]);
        return;
    }
    draws random;
    uint32_t drawn[SHARED];
    draw(&random, &j->states, begin, kind);
    for (int group = 0; group < NUM_GROUPS; group++)
        for (int lane = 0; lane < GROUP; lane++)
            for (int e = 0; e < 2; e++)
                drawn[2 * (group * GROUP + lane) + e] =
                    random.m[e * GROUP + lane] ^ random.m[2 * GROUP + group];
    if (kind.state == BF16_STATE) {
#pragma omp simd
        for (int i = 0; i < SHARED; i++) m_bf16[i] = (uint16_t)(bf16_bits(moved[i], drawn[i]) >> 16);
        return;
    }
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < SHARED; i++) {
        int32_t x = (int32_t)(as_bits(moved[i]) & 0x7fffffffu);
        largest = x > largest ? x : largest;
    }
    const float next = normal_or_zero(as_float((uint32_t)largest) / M_LARGEST);
    const float inverse = next > 0 ? 1 / next : 0;
#pragma omp simd
    for (int i = 0; i < SHARED; i++)
        m_codes[i] = (uint8_t)encode_m(moved[i], inverse, drawn[i] | M_HALF_STEP);
    j->states.m_scale[begin / SHARED] = next;
}

INLINE void momentum(const job *j, size_t begin, size_t end, kinds kind) {
    for (; begin < end; begin += SHARED)
        momentum_block(j, begin, end - begin < SHARED ? (int)(end - begin) : SHARED, kind);
}

#define MOMENTA(name, state)                                                                \
    FOR_EACH_TARGET(name##_fp32, momentum(j, begin, end, (kinds){0, FP32_GRAD, state}))     \
    FOR_EACH_TARGET(name##_bf16, momentum(j, begin, end, (kinds){0, BF16_GRAD, state}))     \
    static range_loop *const *const name[] = {name##_fp32, name##_bf16};

MOMENTA(momentum_fp32_state, FP32_STATE)
MOMENTA(momentum_bf16_state, BF16_STATE)
MOMENTA(momentum_coded_state, CODED_STATE)

static range_loop *const *const *const momenta[] = {
    [FP32_STATE] = momentum_fp32_state,
    [BF16_STATE] = momentum_bf16_state,
    [CODED_STATE] = momentum_coded_state,
};

/* n is a multiple of SHARED unless the momentum is fp32. */
EXPORT void megatrain_momentum(int instruction_set, int num_threads, size_t n, int state,
                               const moments *states, void *grad, int grad_is_bf16,
                               float grad_scale, float pull, float lag) {
    job j = {.states = *states, .grad = grad, .rates = {grad_scale, pull, lag}};
    run(momenta[state][grad_is_bf16][instruction_set], &j, n, num_threads);
}

INLINE void descend(const job *j, size_t begin, size_t end, kinds kind) {
    float *restrict weight = j->weight;
    uint16_t *restrict hi = j->weight;
    int16_t *restrict lo = j->lo;
    const float *restrict fp32 = j->source;
    const uint16_t *restrict bf16 = j->source;
    const float decay = j->rates[0];
    const double step_size = j->rates[1];
#pragma omp simd
    for (size_t i = begin; i < end; i++) {
        float d = kind.grad == BF16_GRAD ? from_bf16(bf16[i]) : fp32[i];
        float p = kind.weight == SPLIT_WEIGHT ? join(hi[i], lo[i]) : weight[i];
        p = (float)((double)(p * decay) - (double)d * step_size);
        if (kind.weight == SPLIT_WEIGHT) {
            hi[i] = hi_of(p);
            lo[i] = lo_of(p);
        } else {
            weight[i] = p;
        }
    }
}

FOR_EACH_TARGET(descend_fp32, descend(j, begin, end, (kinds){FP32_WEIGHT, FP32_GRAD, 0}))
FOR_EACH_TARGET(descend_split_fp32, descend(j, begin, end, (kinds){SPLIT_WEIGHT, FP32_GRAD, 0}))
FOR_EACH_TARGET(descend_split_bf16, descend(j, begin, end, (kinds){SPLIT_WEIGHT, BF16_GRAD, 0}))

/* `lo` is null for an fp32 weight, whose direction must be fp32. */
EXPORT void megatrain_descend(int instruction_set, int num_threads, size_t n, void *weight,
                              int16_t *lo, const void *direction, int direction_is_bf16,
                              float decay, float step_size) {
    job j = {.weight = weight, .lo = lo, .source = direction, .rates = {decay, step_size}};
    range_loop *const *loops = !lo                 ? descend_fp32
                               : direction_is_bf16 ? descend_split_bf16
                                                   : descend_split_fp32;
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

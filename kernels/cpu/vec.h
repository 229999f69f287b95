/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Vectors of f32. Every operation works lane by lane and gives the same bits at every LK_CPU_LEVEL (NaN
 * payloads aside).
 *
 *  V8   8 lanes: what a reduction is defined on (ops.h: 8 virtual lanes, fixed tree)
 *  VT   VT_N lanes: what element-wise work is done in; the width shows nowhere in a result
 *
 * vt_max(a, b) is a > b ? a : b, which is also what MAXPS does: a NaN in a gives b. */

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/number.h"

#if LK_CPU_LEVEL >= 3
#include <immintrin.h>
#endif

#define VEC_INLINE static inline __attribute__((always_inline, unused))

/* exp(x) = 2^n * e^r with n = round(x / ln 2) and r = x - n * ln 2, ln 2 in two parts. e^r is a polynomial
 * of degree 6 (own weighted least-squares fit over |r| <= ln 2 / 2, relative error 3.1e-9). 2^n is applied
 * in two halves so that subnormal results come out rounded. Largest error over all floats: 1.01 ulp. Below
 * EXP_MIN
 * (-inf too) 0, above EXP_MAX +inf, NaN stays NaN. */
#define EXP_MIN (-104.0f) /* e^-104 < 2^-150, half of the smallest subnormal */
#define EXP_MAX 89.0f
#define EXP_LOG2E 0x1.715476p+0f
#define EXP_ROUND 0x1.8p+23f /* adding it leaves round(x) in the low bits */
#define EXP_LN2_HI 0x1.62e4p-1f
#define EXP_LN2_LO 0x1.7f7d1cp-20f
#define EXP_C2 0x1.fffffcp-2f
#define EXP_C3 0x1.555492p-3f
#define EXP_C4 0x1.5558f2p-5f
#define EXP_C5 0x1.1239f2p-7f
#define EXP_C6 0x1.6a2412p-10f

#if LK_CPU_LEVEL >= 3

typedef __m256 V8;

VEC_INLINE V8 v8_zero(void) {
        return _mm256_setzero_ps();
}
VEC_INLINE V8 v8_add(V8 a, V8 b) {
        return _mm256_add_ps(a, b);
}
VEC_INLINE V8 v8_fma(V8 a, V8 b, V8 c) {
        return _mm256_fmadd_ps(a, b, c);
}
VEC_INLINE V8 v8_set1(float f) {
        return _mm256_set1_ps(f);
}
VEC_INLINE V8 v8_load(const void *p) {
        return _mm256_loadu_ps(p);
}
VEC_INLINE void v8_store(void *p, V8 v) {
        _mm256_storeu_ps(p, v);
}
VEC_INLINE V8 v8_load_bf16(const void *p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
VEC_INLINE V8 v8_load_f16(const void *p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(p));
}

#else

typedef struct V8 {
        float f[8];
} V8;

#define V8_EACH(expression)                                                                                 \
        ({                                                                                                  \
                V8 _r;                                                                                      \
                for (int i = 0; i < 8; i++)                                                                 \
                        _r.f[i] = (expression);                                                             \
                _r;                                                                                         \
        })

VEC_INLINE V8 v8_zero(void) {
        return (V8){};
}
VEC_INLINE V8 v8_add(V8 a, V8 b) {
        return V8_EACH(a.f[i] + b.f[i]);
}
VEC_INLINE V8 v8_fma(V8 a, V8 b, V8 c) {
        return V8_EACH(f32_fma(a.f[i], b.f[i], c.f[i]));
}
VEC_INLINE V8 v8_set1(float f) {
        return V8_EACH(f);
}
VEC_INLINE V8 v8_load(const void *p) {
        return V8_EACH(number_get(p, LK_F32, (uint64_t) i));
}
VEC_INLINE void v8_store(void *p, V8 v) {
        memcpy(p, v.f, sizeof(v.f));
}
VEC_INLINE V8 v8_load_bf16(const void *p) {
        return V8_EACH(number_get(p, LK_BF16, (uint64_t) i));
}
VEC_INLINE V8 v8_load_f16(const void *p) {
        return V8_EACH(number_get(p, LK_F16, (uint64_t) i));
}

#endif

/* The fixed tree of ops.h. */
VEC_INLINE float v8_sum(V8 v) {
        float f[8];

        v8_store(f, v);
        return ((f[0] + f[4]) + (f[2] + f[6])) + ((f[1] + f[5]) + (f[3] + f[7]));
}

/* Elements i .. i+7 of p[n], which may start at any byte; +0 beyond the end. */
VEC_INLINE V8 v8_get(const void *p, LkType type, uint64_t i, uint64_t n) {
        const uint8_t *b = (const uint8_t *) p + i * lk_type_size(type);
        uint8_t part[8 * sizeof(float)] = {};

        if (n - i < 8) {
                memcpy(part, b, (n - i) * lk_type_size(type));
                b = part;
        }

        return type == LK_F32 ? v8_load(b) : type == LK_BF16 ? v8_load_bf16(b) : v8_load_f16(b);
}

/* sum(x[i]^2): the reduction of ops.h. */
VEC_INLINE float v8_sum_squares(const void *x, LkType type, uint64_t n) {
        V8 sum = v8_zero();

        for (uint64_t i = 0; i < n; i += 8) {
                V8 v = v8_get(x, type, i, n); /* fma(+0, +0, s) is s for the s >= +0 of a missing element */

                sum = v8_fma(v, v, sum);
        }

        return v8_sum(sum);
}

#if LK_CPU_LEVEL == 4

typedef __m512 VT;
#define VT_N 16u

VEC_INLINE VT vt_zero(void) {
        return _mm512_setzero_ps();
}
VEC_INLINE VT vt_set1(float f) {
        return _mm512_set1_ps(f);
}
VEC_INLINE VT vt_load(const void *p) {
        return _mm512_loadu_ps(p);
}
VEC_INLINE void vt_store(void *p, VT v) {
        _mm512_storeu_ps(p, v);
}
VEC_INLINE VT vt_add(VT a, VT b) {
        return _mm512_add_ps(a, b);
}
VEC_INLINE VT vt_sub(VT a, VT b) {
        return _mm512_sub_ps(a, b);
}
VEC_INLINE VT vt_mul(VT a, VT b) {
        return _mm512_mul_ps(a, b);
}
VEC_INLINE VT vt_div(VT a, VT b) {
        return _mm512_div_ps(a, b);
}
VEC_INLINE VT vt_fma(VT a, VT b, VT c) {
        return _mm512_fmadd_ps(a, b, c);
}
VEC_INLINE VT vt_max(VT a, VT b) {
        return _mm512_max_ps(a, b);
}
/* the bits as an integer, 23 places to the left: the lowest nine become sign and exponent */
VEC_INLINE VT vt_raise(VT v) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23));
}
VEC_INLINE VT vt_load_bf16(const void *p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
VEC_INLINE VT vt_load_f16(const void *p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}
VEC_INLINE VT vt_round_bf16(VT v) {
        __m512i u = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));

        up = _mm512_and_si512(up, _mm512_set1_epi32((int) 0xffff0000u));
        up = _mm512_mask_mov_epi32(
                up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
        return _mm512_castsi512_ps(up);
}
VEC_INLINE VT vt_round_f16(VT v) {
        VT half = _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));

        return _mm512_mask_mov_ps(
                half, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}
/* v holds f16 values already */
VEC_INLINE void vt_store_f16(void *p, VT v) {
        _mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* v holds bf16 values already */
VEC_INLINE void vt_store_bf16(void *p, VT v) {
        _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16)));
}
VEC_INLINE VT vt_exp(VT x) {
        __m512i bias = _mm512_set1_epi32(127), n, half;
        VT t, r, p;

        x = vt_max(vt_set1(EXP_MIN), x);
        x = _mm512_min_ps(vt_set1(EXP_MAX), x);
        t = vt_fma(x, vt_set1(EXP_LOG2E), vt_set1(EXP_ROUND));
        n = _mm512_sub_epi32(_mm512_castps_si512(t), _mm512_castps_si512(vt_set1(EXP_ROUND)));
        t = vt_sub(t, vt_set1(EXP_ROUND));
        r = vt_fma(t, vt_set1(-EXP_LN2_HI), x);
        r = vt_fma(t, vt_set1(-EXP_LN2_LO), r);
        p = vt_fma(vt_set1(EXP_C6), r, vt_set1(EXP_C5));
        p = vt_fma(p, r, vt_set1(EXP_C4));
        p = vt_fma(p, r, vt_set1(EXP_C3));
        p = vt_fma(p, r, vt_set1(EXP_C2));
        p = vt_add(vt_fma(vt_mul(r, r), p, r), vt_set1(1));
        half = _mm512_srai_epi32(n, 1);
        p = vt_mul(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23)));
        return vt_mul(p, _mm512_castsi512_ps(
                                 _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(n, half), bias), 23)));
}

#else

typedef V8 VT;
#define VT_N 8u
#define vt_zero v8_zero
#define vt_set1 v8_set1
#define vt_load v8_load
#define vt_store v8_store
#define vt_add v8_add
#define vt_fma v8_fma
#define vt_load_bf16 v8_load_bf16
#define vt_load_f16 v8_load_f16

#if LK_CPU_LEVEL == 3

VEC_INLINE VT vt_sub(VT a, VT b) {
        return _mm256_sub_ps(a, b);
}
VEC_INLINE VT vt_mul(VT a, VT b) {
        return _mm256_mul_ps(a, b);
}
VEC_INLINE VT vt_div(VT a, VT b) {
        return _mm256_div_ps(a, b);
}
VEC_INLINE VT vt_max(VT a, VT b) {
        return _mm256_max_ps(a, b);
}
VEC_INLINE VT vt_raise(VT v) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23));
}
VEC_INLINE VT vt_round_bf16(VT v) {
        __m256i u = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));

        up = _mm256_and_si256(up, _mm256_set1_epi32((int) 0xffff0000u));
        return _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
VEC_INLINE VT vt_round_f16(VT v) {
        VT half = _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));

        return _mm256_blendv_ps(
                half, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
/* v holds f16 values already */
VEC_INLINE void vt_store_f16(void *p, VT v) {
        _mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* v holds bf16 values already */
VEC_INLINE void vt_store_bf16(void *p, VT v) {
        __m256i u = _mm256_srli_epi32(_mm256_castps_si256(v), 16);

        u = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0x08);
        _mm_storeu_si128(p, _mm256_castsi256_si128(u));
}
VEC_INLINE VT vt_exp(VT x) {
        __m256i bias = _mm256_set1_epi32(127), n, half;
        VT t, r, p;

        x = vt_max(vt_set1(EXP_MIN), x);
        x = _mm256_min_ps(vt_set1(EXP_MAX), x);
        t = vt_fma(x, vt_set1(EXP_LOG2E), vt_set1(EXP_ROUND));
        n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_castps_si256(vt_set1(EXP_ROUND)));
        t = vt_sub(t, vt_set1(EXP_ROUND));
        r = vt_fma(t, vt_set1(-EXP_LN2_HI), x);
        r = vt_fma(t, vt_set1(-EXP_LN2_LO), r);
        p = vt_fma(vt_set1(EXP_C6), r, vt_set1(EXP_C5));
        p = vt_fma(p, r, vt_set1(EXP_C4));
        p = vt_fma(p, r, vt_set1(EXP_C3));
        p = vt_fma(p, r, vt_set1(EXP_C2));
        p = vt_add(vt_fma(vt_mul(r, r), p, r), vt_set1(1));
        half = _mm256_srai_epi32(n, 1);
        p = vt_mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
        return vt_mul(p, _mm256_castsi256_ps(
                                 _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23)));
}

#else

VEC_INLINE VT vt_sub(VT a, VT b) {
        return V8_EACH(a.f[i] - b.f[i]);
}
VEC_INLINE VT vt_mul(VT a, VT b) {
        return V8_EACH(a.f[i] * b.f[i]);
}
VEC_INLINE VT vt_div(VT a, VT b) {
        return V8_EACH(a.f[i] / b.f[i]);
}
VEC_INLINE VT vt_max(VT a, VT b) {
        return V8_EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]);
}
VEC_INLINE VT vt_raise(VT v) {
        return V8_EACH(f32_from_bits(f32_bits(v.f[i]) << 23));
}
VEC_INLINE VT vt_round_bf16(VT v) {
        return V8_EACH(f32_from_bf16(bf16_from_f32(v.f[i])));
}
VEC_INLINE VT vt_round_f16(VT v) {
        return V8_EACH(f32_from_f16(f16_from_f32(v.f[i])));
}
/* v holds f16 values already */
VEC_INLINE void vt_store_f16(void *p, VT v) {
        uint16_t h[8];

        for (int i = 0; i < 8; i++)
                h[i] = f16_from_f32(v.f[i]);

        memcpy(p, h, sizeof(h));
}
/* v holds bf16 values already */
VEC_INLINE void vt_store_bf16(void *p, VT v) {
        uint16_t h[8];

        for (int i = 0; i < 8; i++)
                h[i] = (uint16_t) (f32_bits(v.f[i]) >> 16);

        memcpy(p, h, sizeof(h));
}
VEC_INLINE float exp_one(float x) {
        float t, r, p;
        uint32_t n, half;

        x = EXP_MIN > x ? EXP_MIN : x;
        x = EXP_MAX < x ? EXP_MAX : x;
        t = f32_fma(x, EXP_LOG2E, EXP_ROUND);
        n = f32_bits(t) - f32_bits(EXP_ROUND); /* two's complement */
        t = t - EXP_ROUND;
        r = f32_fma(t, -EXP_LN2_HI, x);
        r = f32_fma(t, -EXP_LN2_LO, r);
        p = f32_fma(EXP_C6, r, EXP_C5);
        p = f32_fma(p, r, EXP_C4);
        p = f32_fma(p, r, EXP_C3);
        p = f32_fma(p, r, EXP_C2);
        p = f32_fma(r * r, p, r) + 1;
        half = (uint32_t) ((int32_t) n >> 1);
        p = p * f32_from_bits((half + 127u) << 23);
        return p * f32_from_bits((n - half + 127u) << 23);
}
VEC_INLINE VT vt_exp(VT x) {
        return V8_EACH(exp_one(x.f[i]));
}

#endif
#endif

/* Elements i .. i+VT_N-1 of p[n], which may start at any byte; +0 beyond the end. */
VEC_INLINE VT vt_get(const void *p, LkType type, uint64_t i, uint64_t n) {
        const uint8_t *b = (const uint8_t *) p + i * lk_type_size(type);
        uint8_t part[VT_N * sizeof(float)] = {};

        if (n - i < VT_N) {
                memcpy(part, b, (n - i) * lk_type_size(type));
                b = part;
        }

        return type == LK_F32 ? vt_load(b) : type == LK_BF16 ? vt_load_bf16(b) : vt_load_f16(b);
}

/* Also of zero, which 0 - v would not do. */
VEC_INLINE VT vt_negate(VT v) {
        return vt_mul(vt_set1(-1), v);
}

/* The rounding point of an activation type. */
VEC_INLINE VT vt_round(VT v, LkType type) {
        return type == LK_BF16 ? vt_round_bf16(v) : type == LK_F16 ? vt_round_f16(v) : v;
}

/* Rounds v to `type` and stores the lanes that lie inside p[n]. */
VEC_INLINE void vt_put(void *p, LkType type, uint64_t i, uint64_t n, VT v) {
        uint8_t *b = (uint8_t *) p + i * lk_type_size(type), part[VT_N * sizeof(float)];
        uint8_t *to = n - i < VT_N ? part : b;

        if (type == LK_F32)
                vt_store(to, v);
        else if (type == LK_BF16)
                vt_store_bf16(to, vt_round_bf16(v));
        else
                vt_store_f16(to, vt_round_f16(v));

        if (to == part)
                memcpy(b, part, (n - i) * lk_type_size(type));
}

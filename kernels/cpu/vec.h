// One vector register of floats or 32-bit words, the same operations on every instruction set.
//
// Compiled once a set (PD_AVX512BF16, PD_AVX512, else AVX2+FMA), always within an anonymous namespace and without
// templates of the standard library, so that the linker cannot hand one set's code to another.
#pragma once

#include <immintrin.h>
#include <cstdint>
#include <cstring>

#define PD_UNROLL _Pragma("GCC unroll 16")  // of a loop over registers: -O2 would keep them in memory

namespace {

using bf16 = uint16_t;  // the upper half of a float's bits

#if defined(PD_AVX512) || defined(PD_AVX512BF16)

constexpr int W = 16;  // lanes
constexpr int REGISTERS = 32;
using F = __m512;
using U = __m512i;
using Mask = __mmask16;

inline F zero() { return _mm512_setzero_ps(); }
inline F splat(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline F round_even(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(F a) { return _mm512_reduce_add_ps(a); }
inline float largest(F a) { return _mm512_reduce_max_ps(a); }
inline __m256 halved(F a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }

inline Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask unordered(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline unsigned bits(Mask m) { return m; }
inline F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
inline U select(Mask m, U yes, U no) { return _mm512_mask_blend_epi32(m, no, yes); }

inline U splat_u(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline U load_u(const void* p) { return _mm512_loadu_si512(p); }
inline void store_u(void* p, U a) { _mm512_storeu_si512(p, a); }
inline U add(U a, U b) { return _mm512_add_epi32(a, b); }
inline U sub(U a, U b) { return _mm512_sub_epi32(a, b); }
inline U bit_and(U a, U b) { return _mm512_and_si512(a, b); }
inline U bit_or(U a, U b) { return _mm512_or_si512(a, b); }
inline U bit_xor(U a, U b) { return _mm512_xor_si512(a, b); }
template <int N> inline U shift_left(U a) { return _mm512_slli_epi32(a, N); }
template <int N> inline U shift_right(U a) { return _mm512_srli_epi32(a, N); }
inline F as_f(U a) { return _mm512_castsi512_ps(a); }
inline U as_u(F a) { return _mm512_castps_si512(a); }
inline F to_f(U a) { return _mm512_cvtepi32_ps(a); }  // of signed words
inline U to_i(F a) { return _mm512_cvtps_epi32(a); }  // to nearest even
inline F unsigned_to_f(U a) { return _mm512_cvtepu32_ps(a); }

inline void multiply_wide(U a, U b, U* high, U* low) {  // 32 x 32 -> 64 bits, unsigned
  const U even = _mm512_mul_epu32(a, b);
  const U odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline U lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline F every_fourth(const float* p) { return _mm512_i32gather_ps(shift_left<2>(lane_numbers()), p, 4); }
inline F load(const bf16* p) {
  return as_f(shift_left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
inline void store_upper_halves(bf16* p, U a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(shift_right<16>(a)));
}

#else

constexpr int W = 8;
constexpr int REGISTERS = 16;
using F = __m256;
using U = __m256i;
using Mask = __m256;

inline F zero() { return _mm256_setzero_ps(); }
inline F splat(float x) { return _mm256_set1_ps(x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F round_even(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline __m256 halved(F a) { return a; }

inline Mask less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Mask equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline Mask unordered(F a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline unsigned bits(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
inline F select(Mask m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
inline U select(Mask m, U yes, U no) {
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(no), _mm256_castsi256_ps(yes), m));
}

inline U splat_u(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline U load_u(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_u(void* p, U a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
inline U add(U a, U b) { return _mm256_add_epi32(a, b); }
inline U sub(U a, U b) { return _mm256_sub_epi32(a, b); }
inline U bit_and(U a, U b) { return _mm256_and_si256(a, b); }
inline U bit_or(U a, U b) { return _mm256_or_si256(a, b); }
inline U bit_xor(U a, U b) { return _mm256_xor_si256(a, b); }
template <int N> inline U shift_left(U a) { return _mm256_slli_epi32(a, N); }
template <int N> inline U shift_right(U a) { return _mm256_srli_epi32(a, N); }
inline F as_f(U a) { return _mm256_castsi256_ps(a); }
inline U as_u(F a) { return _mm256_castps_si256(a); }
inline F to_f(U a) { return _mm256_cvtepi32_ps(a); }
inline U to_i(F a) { return _mm256_cvtps_epi32(a); }
inline F unsigned_to_f(U a) {  // upper * 2**16 is exact, the sum rounds once: to nearest even, as AVX-512's
  return fma(to_f(shift_right<16>(a)), splat(65536.0f), to_f(bit_and(a, splat_u(0xffff))));
}

inline void multiply_wide(U a, U b, U* high, U* low) {
  const U even = _mm256_mul_epu32(a, b);
  const U odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline F every_fourth(const float* p) {
  return _mm256_setr_ps(p[0], p[4], p[8], p[12], p[16], p[20], p[24], p[28]);
}
inline U lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline F load(const bf16* p) {
  return as_f(shift_left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
inline void store_upper_halves(bf16* p, U a) {
  const U low = shift_right<16>(a);
  const U packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

#endif

// ---- from here on nothing knows the instruction set -------------------------------------------------------------

constexpr uint32_t UPPER = 0xffff0000u;

// The four registers' sums, side by side.
inline void sum_four(const F (&x)[4], float* p) {
  const __m256 pairs = _mm256_hadd_ps(halved(x[0]), halved(x[1])), others = _mm256_hadd_ps(halved(x[2]), halved(x[3]));
  const __m256 quarters = _mm256_hadd_ps(pairs, others);
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1)));
}

// *acc += a * b, in acc's own register: left to itself, GCC 12 rotates accumulators through registers and, where they
// fill the register file, through memory (a linear of 6 rows: 62 GFLOP/s so, 80 with this).
inline void accumulate(F* acc, F a, F b) { asm("vfmadd231ps %2, %1, %0" : "+v"(*acc) : "v"(a), "v"(b)); }

// A float's bits rounded to the nearest bf16, ties to even, in the upper half; the lower half is left over. NaN stays.
inline U round_bits(F a) {
  const U word = as_u(a);
  const U odd = bit_and(shift_right<16>(word), splat_u(1));
  return select(unordered(a), splat_u(0x7fc00000), add(word, add(odd, splat_u(0x7fff))));
}

inline void store(bf16* p, F a) { store_upper_halves(p, round_bits(a)); }

// What a T can hold of a: rounded to bf16 and back, or untouched.
inline F rounded(F a, const float*) { return a; }
inline F rounded(F a, const bf16*) { return as_f(bit_and(round_bits(a), splat_u(UPPER))); }

// n < W elements, the rest zero.
template <class T> inline F load_some(const T* p, int64_t n) {
  T full[W] = {};
  memcpy(full, p, static_cast<size_t>(n) * sizeof(T));
  return load(full);
}
template <class T> inline void store_some(T* p, F a, int64_t n) {
  T full[W];
  store(full, a);
  memcpy(p, full, static_cast<size_t>(n) * sizeof(T));
}

// 2 W neighbouring elements in two registers. Which lane holds which is the type's own affair: `load_two` and
// `store_two` agree, and sums over all lanes do not care. For bf16: the even ones and the odd ones, without a shuffle.
struct Two {
  F a, b;
};
inline Two load_two(const float* p) { return {load(p), load(p + W)}; }
inline Two load_two(const bf16* p) {
  const U pairs = load_u(p);
  return {as_f(shift_left<16>(pairs)), as_f(bit_and(pairs, splat_u(UPPER)))};
}
inline void store_two(float* p, Two x) {
  store(p, x.a);
  store(p + W, x.b);
}
inline void store_two(bf16* p, Two x) {
  store_u(p, bit_or(shift_right<16>(round_bits(x.a)), bit_and(round_bits(x.b), splat_u(UPPER))));
}
template <class T> inline Two load_two_some(const T* p, int64_t n) {  // n < 2 W, the rest zero
  T full[2 * W] = {};
  memcpy(full, p, static_cast<size_t>(n) * sizeof(T));
  return load_two(full);
}
template <class T> inline void store_two_some(T* p, Two x, int64_t n) {
  T full[2 * W];
  store_two(full, x);
  memcpy(p, full, static_cast<size_t>(n) * sizeof(T));
}

// e**x, after Cephes' expf (S. Moshier): error below 2 ulp; under -87 it answers about 1e-38, which callers take for 0.
inline F exp(F x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const F n = round_even(mul(x, splat(1.44269504088896341f)));
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, mul(r, r), add(r, splat(1.0f)));
  return mul(y, as_f(shift_left<23>(add(to_i(n), splat_u(127)))));
}

// The natural logarithm of a normal positive x, after Cephes' logf: error below 2 ulp.
inline F log(F x) {
  const U word = as_u(x);
  // x = m * 2**e with m in [sqrt(1/2), sqrt(2))
  const U shifted = sub(word, splat_u(0x3f3504f3));
  const U exponent = sub(shift_right<23>(add(shifted, splat_u(0x3f800000))), splat_u(127));
  const F e = to_f(exponent);
  const F m = as_f(sub(word, shift_left<23>(exponent)));
  const F r = sub(m, splat(1.0f));
  const F square = mul(r, r);
  F y = splat(7.0376836292e-2f);
  y = fma(y, r, splat(-1.1514610310e-1f));
  y = fma(y, r, splat(1.1676998740e-1f));
  y = fma(y, r, splat(-1.2420140846e-1f));
  y = fma(y, r, splat(1.4249322787e-1f));
  y = fma(y, r, splat(-1.6668057665e-1f));
  y = fma(y, r, splat(2.0000714765e-1f));
  y = fma(y, r, splat(-2.4999993993e-1f));
  y = fma(y, r, splat(3.3333331174e-1f));
  y = mul(mul(y, r), square);
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(square, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), add(r, y));
}

}  // namespace

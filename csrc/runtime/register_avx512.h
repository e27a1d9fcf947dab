// One AVX-512 register: 16 fp32 values.
#pragma once

#include <immintrin.h>

#include "runtime/quad.h"
#include "runtime/split_fp32_avx512.h"
#include "runtime/transpose_avx512.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct R {
  __m512 r;
  static constexpr int kWidth = 16;

  static R zero() { return {_mm512_setzero_ps()}; }
  static R all(float value) { return {_mm512_set1_ps(value)}; }
  static R load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static R load(const uint16_t* p) {
    const __m256i bf16 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16))};
  }
  // Loads the first `count` values, at most 16, and fills the other lanes with zeros.
  static R load_some(const float* p, int count) {
    return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
  }
  static R load_some(const uint16_t* p, int count) {
    const __m256i bf16 = _mm256_maskz_loadu_epi16(first_lanes(count), p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16))};
  }
  static R broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
  // Repeats p[0], p[1].
  static R broadcast_two(const float* p) {
    return {_mm512_castsi512_ps(
        _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  // Repeats p[odd], p[2 + odd].
  static R broadcast_two_of_four(const float* p, int odd) {
    const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(p));
    return {odd ? _mm512_permute_ps(four, 0xdd) : _mm512_permute_ps(four, 0x88)};
  }
  // Returns those of 2 * kWidth bf16 values that have an even, or an odd, index.
  static R even(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
  }
  static R odd(const uint16_t* p) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
  }

  void store(float* p) const { _mm512_storeu_ps(p, r); }
  // Rounds to the nearest bf16, ties to even. A NaN keeps its sign and stays a NaN.
  void store(uint16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded()); }
  void store_some(float* p, int count) const { _mm512_mask_storeu_ps(p, first_lanes(count), r); }
  void store_some(uint16_t* p, int count) const {
    _mm256_mask_storeu_epi16(p, first_lanes(count), rounded());
  }
  // Stores both as 32 contiguous bf16.
  static void store_two(R a, R b, uint16_t* p) { _mm512_storeu_si512(p, rounded(a, b)); }
  // Stores that bypass the caches.
  void stream(float* p) const { _mm512_stream_ps(p, r); }
  void stream(uint16_t* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), rounded()); }
  static void stream_two(R a, R b, uint16_t* p) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), rounded(a, b));
  }
  // Stores the sum of each pair of neighbours among 16 values.
  static void store_pair_sums(const R (&v)[1], float* p) {
    const __m512 sums = _mm512_add_ps(v[0].r, _mm512_permute_ps(v[0].r, 0xb1));
    _mm256_storeu_ps(p, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, sums)));
  }

  // Splits the values of `a`, then of `b`, into the upper half of their bits and the rest rounded
  // to bf16. The sum of the two is within 2^-16 of the value.
  static void store_split(R a, R b, uint16_t* high, uint16_t* low) {
    _mm512_storeu_si512(high, upper_halves(a.r, b.r));
    const R first{without_upper_half(a.r)}, second{without_upper_half(b.r)};
    store_two(first, second, low);
  }

  void add_product(R a, R b) { r = _mm512_fmadd_ps(a.r, b.r, r); }
  friend R operator+(R a, R b) { return {_mm512_add_ps(a.r, b.r)}; }
  friend R operator-(R a, R b) { return {_mm512_sub_ps(a.r, b.r)}; }
  friend R operator*(R a, R b) { return {_mm512_mul_ps(a.r, b.r)}; }
  friend R operator/(R a, R b) { return {_mm512_div_ps(a.r, b.r)}; }
  // Both return the second operand if either operand is a NaN.
  friend R max(R a, R b) { return {_mm512_max_ps(a.r, b.r)}; }
  friend R min(R a, R b) { return {_mm512_min_ps(a.r, b.r)}; }
  R nearest() const {
    return {_mm512_roundscale_ps(r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  // Returns the first `count` lanes of this register and the remaining lanes of `others`.
  R first(int count, R others) const {
    const unsigned some = count <= 0 ? 0 : count >= kWidth ? 0xffffu : (1u << count) - 1;
    return {_mm512_mask_blend_ps(__mmask16(some), others.r, r)};
  }
  // Shifts the low bits of each value to the place of its exponent.
  R exponent_of_low_bits() const {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(r), 23))};
  }
  // Returns 2 to the power of integers in -126 … 127.
  R power_of_two() const {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(r), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
  }
  // Returns columns 4 quarter … 4 quarter + 3 of 16 lines that are `stride` floats apart.
  static void transpose(const float* lines, ptrdiff_t stride, int quarter, R (&out)[4]) {
    __m512 columns[4];
    transpose_quarter(lines, stride, quarter, columns);
    for (int i = 0; i < 4; ++i) out[i].r = columns[i];
  }
  // Adds the quarters of the register, which leaves four partial sums.
  Quad folded() const {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(r), _mm512_extractf32x8_ps(r, 1));
    return {_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1))};
  }
  float largest() const { return _mm512_reduce_max_ps(r); }

#ifdef VLORA_HAS_BF16_PRODUCTS
  using Pairs = __m512bh;
  static Pairs load_pairs(const uint16_t* p) { return Pairs(_mm512_loadu_si512(p)); }
  static Pairs broadcast_pair(const uint16_t* p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return Pairs(_mm512_set1_epi32(pair));
  }
  // Repeats two pairs.
  static Pairs broadcast_two_pairs(const uint16_t* p) {
    return Pairs(_mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  void add_pairs(Pairs a, Pairs b) { r = _mm512_dpbf16_ps(r, a, b); }
#endif
  // Keeps the compiler from removing or reordering the computation of the register, in
  // microbenchmarks.
  void keep() { asm volatile("" : "+v"(r)); }

 private:
  static __mmask16 first_lanes(int count) { return __mmask16((1u << count) - 1); }
#ifdef VLORA_HAS_BF16_PRODUCTS
  __m256i rounded() const { return __m256i(_mm512_cvtneps_pbh(r)); }
  static __m512i rounded(R a, R b) { return __m512i(_mm512_cvtne2ps_pbh(b.r, a.r)); }
#else
  __m256i rounded() const {
    const __m512i bits = _mm512_castps_si512(r);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(r, r, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
  }
  static __m512i rounded(R a, R b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(a.rounded()), b.rounded(), 1);
  }
#endif
};

}  // namespace vlora::runtime::VLORA_ISA

// One AVX2 register: 8 fp32 values.
#pragma once

#include <immintrin.h>

#include "runtime/quad.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct R {
  __m256 r;
  static constexpr int kWidth = 8;

  static R zero() { return {_mm256_setzero_ps()}; }
  static R all(float value) { return {_mm256_set1_ps(value)}; }
  static R load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static R load(const uint16_t* p) {
    const __m128i bf16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16))};
  }
  static R broadcast(const float* p) { return {_mm256_broadcast_ss(p)}; }
  // Repeats p[0], p[1].
  static R broadcast_two(const float* p) {
    return {_mm256_castsi256_ps(
        _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  // Repeats p[odd], p[2 + odd].
  static R broadcast_two_of_four(const float* p, int odd) {
    const __m256 four = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
    return {odd ? _mm256_permute_ps(four, 0xdd) : _mm256_permute_ps(four, 0x88)};
  }
  // Returns those of 2 * kWidth bf16 values that have an even, or an odd, index.
  static R even(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs(p), 16))};
  }
  static R odd(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_and_si256(pairs(p), _mm256_set1_epi32(int(0xffff0000u))))};
  }

  void store(float* p) const { _mm256_storeu_ps(p, r); }
  // Rounds to the nearest bf16, ties to even. A NaN keeps its sign and stays a NaN.
  void store(uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(rounded(*this, *this)));
  }
  // Stores both as 16 contiguous bf16.
  static void store_two(R a, R b, uint16_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded(a, b));
  }
  // Stores both as 16 bf16, interleaved value by value, rounded as in `store`. A NaN must be a
  // quiet one, which results of arithmetic are.
  static void store_interleaved(R even, R odd, uint16_t* p) {
    const __m256i low = _mm256_srli_epi32(even.rounded_in_upper_half(), 16),
                  high = odd.rounded_in_upper_half();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi16(low, high, 0xaa));
  }
  // Stores that bypass the caches.
  void stream(float* p) const { _mm256_stream_ps(p, r); }
  static void stream_two(R a, R b, uint16_t* p) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), rounded(a, b));
  }
  // Stores the sum of each pair of neighbours among 16 values.
  static void store_pair_sums(const R (&v)[2], float* p) {
    const __m256 sums = _mm256_hadd_ps(v[0].r, v[1].r);  // within halves of 128 bits
    _mm256_storeu_ps(p, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8)));
  }

  void add_product(R a, R b) { r = _mm256_fmadd_ps(a.r, b.r, r); }
  friend R operator+(R a, R b) { return {_mm256_add_ps(a.r, b.r)}; }
  friend R operator-(R a, R b) { return {_mm256_sub_ps(a.r, b.r)}; }
  friend R operator*(R a, R b) { return {_mm256_mul_ps(a.r, b.r)}; }
  friend R operator/(R a, R b) { return {_mm256_div_ps(a.r, b.r)}; }
  // Both return the second operand if either operand is a NaN.
  friend R max(R a, R b) { return {_mm256_max_ps(a.r, b.r)}; }
  friend R min(R a, R b) { return {_mm256_min_ps(a.r, b.r)}; }
  R nearest() const { return {_mm256_round_ps(r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // Returns the first `count` lanes of this register and the remaining lanes of `others`.
  R first(int count, R others) const {
    const __m256i some =
        _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return {_mm256_blendv_ps(others.r, r, _mm256_castsi256_ps(some))};
  }
  // Shifts the low bits of each value to the place of its exponent.
  R exponent_of_low_bits() const {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(r), 23))};
  }
  // Returns 2 to the power of integers in -126 … 127.
  R power_of_two() const {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(r), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
  }
  // Adds the halves of the register, which leaves four partial sums.
  Quad folded() const { return low() + high(); }
  float largest() const { return max(low(), high()).largest(); }

  // Keeps the compiler from removing or reordering the computation of the register, in
  // microbenchmarks.
  void keep() { asm volatile("" : "+x"(r)); }

 private:
  __m256i rounded_in_upper_half() const {
    const __m256i bits = _mm256_castps_si256(r);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(r, r, _CMP_ORD_Q));
    return _mm256_add_epi32(bits, _mm256_and_si256(number, up));
  }
  // Each bf16 in the low half of 32 bits.
  __m256i rounded() const {
    const __m256i bits = _mm256_castps_si256(r);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(r, r, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
  }
  static __m256i rounded(R a, R b) {
    // packus works within halves of 128 bits.
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a.rounded(), b.rounded()), 0xd8);
  }
  Quad low() const { return {_mm256_castps256_ps128(r)}; }
  Quad high() const { return {_mm256_extractf128_ps(r, 1)}; }
  static __m256i pairs(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
};

}  // namespace vlora::runtime::VLORA_ISA

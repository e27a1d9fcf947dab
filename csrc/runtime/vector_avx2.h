// Sixteen fp32 values in two AVX2 registers.
#pragma once

#include <immintrin.h>

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct V {
  __m256 lo, hi;
  using Scalar = __m256;

  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static V load(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
  template <class T>
  static V load_some(const T* p, int count) {
    T values[kLanes] = {};
    for (int i = 0; i < count; ++i) values[i] = p[i];
    return load(values);
  }
  static V load_half_of_pairs(const char* p, int odd) { return {half(p, odd), half(p + 32, odd)}; }
  // Of 16 bf16 values those at even places, then those at odd ones.
  static V load_apart(const uint16_t* p) {
    const char* const pairs = reinterpret_cast<const char*>(p);
    return {half(pairs, 0), half(pairs, 1)};
  }
  static Scalar broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  // p[0] and p[1], and of four p[odd] and p[2 + odd], in turn.
  static Scalar two(const float* p) {
    return _mm256_castsi256_ps(
        _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Scalar two_of_four(const float* p, int odd) {
    const __m256 four = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
    return odd ? _mm256_permute_ps(four, 0xdd) : _mm256_permute_ps(four, 0x88);
  }

  void add_product(Scalar s, V b) {
    lo = _mm256_fmadd_ps(s, b.lo, lo);
    hi = _mm256_fmadd_ps(s, b.hi, hi);
  }
  void add(V b) {
    lo = _mm256_add_ps(lo, b.lo);
    hi = _mm256_add_ps(hi, b.hi);
  }

  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  void store(uint16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded()); }
  template <class T>
  void store_some(T* p, int count) const {
    T values[kLanes];
    store(values);
    for (int i = 0; i < count; ++i) p[i] = values[i];
  }
  // The sum of each two neighbours.
  void store_sums_of_two(float* p) const {
    const __m256 sums = _mm256_hadd_ps(lo, hi);  // within halves of 128 bits
    _mm256_storeu_ps(p, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8)));
  }
  static constexpr bool kJoins = false;  // two registers of bf16 are one line
  void store_past_caches(float* p) const {
    _mm256_stream_ps(p, lo);
    _mm256_stream_ps(p + 8, hi);
  }
  void store_past_caches(uint16_t* p) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), rounded());
  }
  // The other way round, to nearest, ties to even. Of results of arithmetic, where a NaN is a quiet one.
  void store_together(uint16_t* p) const {
    const __m256i even = _mm256_srli_epi32(rounded_up(lo), 16), odd = rounded_up(hi);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi16(even, odd, 0xaa));
  }

 private:
  // The upper half is the value in bf16.
  static __m256i rounded_up(__m256 r) {
    const __m256i bits = _mm256_castps_si256(r);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(r, r, _CMP_ORD_Q));
    return _mm256_add_epi32(bits, _mm256_and_si256(number, up));
  }
  static __m256 widen(const uint16_t* p) {
    const __m128i bf16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
  }
  static __m256 half(const char* p, int odd) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(odd ? _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u)))
                                   : _mm256_slli_epi32(pairs, 16));
  }
  // To nearest, ties to even; a NaN keeps its sign and stays a NaN.
  static __m256i high_halves(__m256 r) {
    const __m256i bits = _mm256_castps_si256(r);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(r, r, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
  }
  __m256i rounded() const {
    const __m256i packed = _mm256_packus_epi32(high_halves(lo), high_halves(hi));
    return _mm256_permute4x64_epi64(packed, 0xd8);  // packus works within halves of 128 bits
  }
};

inline float sum_of(V v) {
  float values[kLanes];
  v.store(values);
  float sum = 0;
  for (float value : values) sum += value;
  return sum;
}

}  // namespace vlora::runtime::VLORA_ISA

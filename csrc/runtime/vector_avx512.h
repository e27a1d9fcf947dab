// Sixteen fp32 values in one AVX-512 register.
#pragma once

#include <immintrin.h>

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct V {
  __m512 r;
  using Scalar = __m512;

  static V zero() { return {_mm512_setzero_ps()}; }
  static V load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static V load(const uint16_t* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V load_some(const float* p, int count) { return {_mm512_maskz_loadu_ps(mask(count), p)}; }
  static V load_some(const uint16_t* p, int count) {
    return widen(_mm256_maskz_loadu_epi16(mask(count), p));
  }
  static V load_half_of_pairs(const char* p, int odd) {
    const __m512i pairs = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(odd ? _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u)))
                                    : _mm512_slli_epi32(pairs, 16))};
  }
  static Scalar broadcast(const float* p) { return _mm512_set1_ps(*p); }
  // p[0] and p[1], and of four p[odd] and p[2 + odd], in turn.
  static Scalar two(const float* p) {
    return _mm512_castsi512_ps(_mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Scalar two_of_four(const float* p, int odd) {
    const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(p));
    return odd ? _mm512_permute_ps(four, 0xdd) : _mm512_permute_ps(four, 0x88);
  }

  void add_product(Scalar s, V b) { r = _mm512_fmadd_ps(s, b.r, r); }
  void add(V b) { r = _mm512_add_ps(r, b.r); }

  void store(float* p) const { _mm512_storeu_ps(p, r); }
  void store(uint16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded()); }
  void store_some(float* p, int count) const { _mm512_mask_storeu_ps(p, mask(count), r); }
  void store_some(uint16_t* p, int count) const {
    _mm256_mask_storeu_epi16(p, mask(count), rounded());
  }
  // The sum of each two neighbours.
  void store_sums_of_two(float* p) const {
    const __m512 sums = _mm512_add_ps(r, _mm512_permute_ps(r, 0xb1));
    _mm256_storeu_ps(p, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, sums)));
  }
  // Of bf16, two registers to one line.
  static constexpr bool kJoins = true;
  static void store_joined(uint16_t* p, V a, V b, bool past_caches) {
    const __m512i line = joined(a, b);
    if (past_caches)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), line);
    else
      _mm512_storeu_si512(p, line);
  }
  void store_past_caches(float* p) const { _mm512_stream_ps(p, r); }
  void store_past_caches(uint16_t* p) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), rounded());
  }

#ifdef VLORA_HAS_BF16_PRODUCTS
  using Pairs = __m512bh;
  static Pairs load_pairs(const char* p) { return Pairs(_mm512_loadu_si512(p)); }
  static Pairs broadcast_pair(const void* p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return Pairs(_mm512_set1_epi32(pair));
  }
  static Pairs two_pairs(const void* p) {
    return Pairs(_mm512_broadcastq_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
  }
  void add_pairs(Pairs s, Pairs b) { r = _mm512_dpbf16_ps(r, s, b); }
  __m256i rounded() const { return __m256i(_mm512_cvtneps_pbh(r)); }
  static __m512i joined(V a, V b) { return __m512i(_mm512_cvtne2ps_pbh(b.r, a.r)); }
#else
  // To nearest, ties to even; a NaN keeps its sign and stays a NaN.
  __m256i rounded() const {
    const __m512i bits = _mm512_castps_si512(r);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(r, r, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
  }
  static __m512i joined(V a, V b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(a.rounded()), b.rounded(), 1);
  }
#endif

 private:
  static __mmask16 mask(int count) { return __mmask16((1u << count) - 1); }
  static V widen(__m256i bf16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16))};
  }
};

inline float sum_of(V v) { return _mm512_reduce_add_ps(v.r); }

}  // namespace vlora::runtime::VLORA_ISA

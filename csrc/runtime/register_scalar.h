// One SSE2 register: 4 fp32 values. Every x86-64 CPU has it. This version is portable, but slow.
#pragma once

#include <emmintrin.h>

#include "runtime/bf16.h"
#include "runtime/quad.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct R {
  __m128 r;
  static constexpr int kWidth = 4;

  static R zero() { return {_mm_setzero_ps()}; }
  static R all(float value) { return {_mm_set1_ps(value)}; }
  static R load(const float* p) { return {_mm_loadu_ps(p)}; }
  static R load(const uint16_t* p) {
    const __m128i bf16 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bf16))};
  }
  static R broadcast(const float* p) { return {_mm_set1_ps(*p)}; }
  // Repeats p[0], p[1].
  static R broadcast_two(const float* p) { return {_mm_setr_ps(p[0], p[1], p[0], p[1])}; }
  // Repeats p[odd], p[2 + odd].
  static R broadcast_two_of_four(const float* p, int odd) {
    return {_mm_setr_ps(p[odd], p[2 + odd], p[odd], p[2 + odd])};
  }
  // Returns those of 2 * kWidth bf16 values that have an even, or an odd, index.
  static R even(const uint16_t* p) { return {_mm_castsi128_ps(_mm_slli_epi32(pairs(p), 16))}; }
  static R odd(const uint16_t* p) {
    return {_mm_castsi128_ps(_mm_and_si128(pairs(p), _mm_set1_epi32(int(0xffff0000u))))};
  }

  void store(float* p) const { _mm_storeu_ps(p, r); }
  // Rounds to the nearest bf16, ties to even. A NaN keeps its sign and stays a NaN.
  void store(uint16_t* p) const {
    float values[kWidth];
    store(values);
    for (int i = 0; i < kWidth; ++i) p[i] = bf16_of(values[i]);
  }

  // Stores both as 8 contiguous bf16.
  static void store_two(R a, R b, uint16_t* p) {
    a.store(p);
    b.store(p + kWidth);
  }
  // Stores both as 8 bf16, interleaved value by value.
  static void store_interleaved(R even, R odd, uint16_t* p) {
    store_two({_mm_unpacklo_ps(even.r, odd.r)}, {_mm_unpackhi_ps(even.r, odd.r)}, p);
  }
  // In other instruction sets these stores bypass the caches.
  void stream(float* p) const { store(p); }
  static void stream_two(R a, R b, uint16_t* p) { store_two(a, b, p); }
  // Stores the sum of each pair of neighbours among 16 values.
  static void store_pair_sums(const R (&v)[4], float* p) {
    for (int i = 0; i < 4; i += 2)
      _mm_storeu_ps(p + 2 * i,
                    _mm_add_ps(_mm_shuffle_ps(v[i].r, v[i + 1].r, _MM_SHUFFLE(2, 0, 2, 0)),
                               _mm_shuffle_ps(v[i].r, v[i + 1].r, _MM_SHUFFLE(3, 1, 3, 1))));
  }
  // Splits the values of `a`, then of `b`, into the upper half of their bits and the rest rounded
  // to bf16. The sum of the two is within 2^-16 of the value.
  static void store_split(R a, R b, uint16_t* high, uint16_t* low) {
    float values[2 * kWidth];
    a.store(values);
    b.store(values + kWidth);
    for (int i = 0; i < 2 * kWidth; ++i) {
      high[i] = take_upper_half(values[i]);
      low[i] = bf16_of(values[i]);
    }
  }

  void add_product(R a, R b) { r = _mm_add_ps(_mm_mul_ps(a.r, b.r), r); }
  friend R operator+(R a, R b) { return {_mm_add_ps(a.r, b.r)}; }
  friend R operator-(R a, R b) { return {_mm_sub_ps(a.r, b.r)}; }
  friend R operator*(R a, R b) { return {_mm_mul_ps(a.r, b.r)}; }
  friend R operator/(R a, R b) { return {_mm_div_ps(a.r, b.r)}; }
  // Both return the second operand if either operand is a NaN.
  friend R max(R a, R b) { return {_mm_max_ps(a.r, b.r)}; }
  friend R min(R a, R b) { return {_mm_min_ps(a.r, b.r)}; }
  R nearest() const { return {_mm_cvtepi32_ps(_mm_cvtps_epi32(r))}; }
  // Returns the first `count` lanes of this register and the remaining lanes of `others`.
  R first(int count, R others) const {
    const __m128 some =
        _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_set1_epi32(count), _mm_setr_epi32(0, 1, 2, 3)));
    return {_mm_or_ps(_mm_and_ps(some, r), _mm_andnot_ps(some, others.r))};
  }
  // Shifts the low bits of each value to the place of its exponent.
  R exponent_of_low_bits() const {
    return {_mm_castsi128_ps(_mm_slli_epi32(_mm_castps_si128(r), 23))};
  }
  // Returns 2 to the power of integers in -126 … 127.
  R power_of_two() const {
    const __m128i exponent = _mm_add_epi32(_mm_cvtps_epi32(r), _mm_set1_epi32(127));
    return {_mm_castsi128_ps(_mm_slli_epi32(exponent, 23))};
  }
  // Returns the four values as partial sums.
  Quad folded() const { return {r}; }
  float largest() const { return Quad{r}.largest(); }

#ifdef VLORA_HAS_BF16_PRODUCTS
  // The equivalent of vdpbf16ps, for the emulation of AMX.
  struct Pairs {
    __m128 even, odd;
  };
  static Pairs load_pairs(const uint16_t* p) { return {R::even(p).r, R::odd(p).r}; }
  static Pairs broadcast_pair(const uint16_t* p) {
    return {_mm_set1_ps(fp32_of(p[0])), _mm_set1_ps(fp32_of(p[1]))};
  }
  static Pairs broadcast_two_pairs(const uint16_t* p) {
    const float values[4] = {fp32_of(p[0]), fp32_of(p[1]), fp32_of(p[2]), fp32_of(p[3])};
    return {broadcast_two_of_four(values, 0).r, broadcast_two_of_four(values, 1).r};
  }
  void add_pairs(Pairs a, Pairs b) {
    r = _mm_add_ps(r, _mm_add_ps(_mm_mul_ps(a.even, b.even), _mm_mul_ps(a.odd, b.odd)));
  }
#endif
  // Keeps the compiler from removing or reordering the computation of the register, in
  // microbenchmarks.
  void keep() { asm volatile("" : "+x"(r)); }

 private:
  static __m128i pairs(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
};

}  // namespace vlora::runtime::VLORA_ISA

// Four fp32 values as every x86-64 has them (SSE2). Only portable, not fast.
#pragma once

#include <emmintrin.h>

#include <initializer_list>

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
  // Of 2 * kWidth bf16 values, those at even and at odd places.
  static R even(const uint16_t* p) { return {_mm_castsi128_ps(_mm_slli_epi32(pairs(p), 16))}; }
  static R odd(const uint16_t* p) {
    return {_mm_castsi128_ps(_mm_and_si128(pairs(p), _mm_set1_epi32(int(0xffff0000u))))};
  }

  void store(float* p) const { _mm_storeu_ps(p, r); }
  // Rounded to nearest, ties to even; a NaN keeps its sign and stays a NaN.
  void store(uint16_t* p) const {
    uint32_t bits[kWidth];
    __builtin_memcpy(bits, &r, sizeof bits);
    for (int i = 0; i < kWidth; ++i) {
      const bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
      p[i] = uint16_t((nan ? bits[i] | 0x00400000u : bits[i] + 0x7fffu + (bits[i] >> 16 & 1)) >> 16);
    }
  }

  // Both, one after the other, as the upper halves of their bits, and as bf16 what these leave.
  static void store_halves(R a, R b, uint16_t* high, uint16_t* low) {
    for (const R& x : {a, b}) {
      const __m128i upper = _mm_and_si128(_mm_castps_si128(x.r), _mm_set1_epi32(int(0xffff0000u)));
      uint32_t bits[kWidth];
      __builtin_memcpy(bits, &upper, sizeof bits);
      for (int i = 0; i < kWidth; ++i) *high++ = uint16_t(bits[i] >> 16);
      R{_mm_sub_ps(x.r, _mm_castsi128_ps(upper))}.store(low);
      low += kWidth;
    }
  }

  void add_product(R a, R b) { r = _mm_add_ps(_mm_mul_ps(a.r, b.r), r); }
  friend R operator+(R a, R b) { return {_mm_add_ps(a.r, b.r)}; }
  friend R operator-(R a, R b) { return {_mm_sub_ps(a.r, b.r)}; }
  friend R operator*(R a, R b) { return {_mm_mul_ps(a.r, b.r)}; }
  friend R operator/(R a, R b) { return {_mm_div_ps(a.r, b.r)}; }
  // The second where either is a NaN.
  friend R max(R a, R b) { return {_mm_max_ps(a.r, b.r)}; }
  friend R min(R a, R b) { return {_mm_min_ps(a.r, b.r)}; }
  R nearest() const { return {_mm_cvtepi32_ps(_mm_cvtps_epi32(r))}; }
  // The first `count` lanes, those of `others` beyond them.
  R first(int count, R others) const {
    const __m128 some = _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_set1_epi32(count), _mm_setr_epi32(0, 1, 2, 3)));
    return {_mm_or_ps(_mm_and_ps(some, r), _mm_andnot_ps(some, others.r))};
  }
  // Its low bits as an exponent.
  R exponent_of_low_bits() const {
    return {_mm_castsi128_ps(_mm_slli_epi32(_mm_castps_si128(r), 23))};
  }
  // 2 to the power of whole numbers in -126 … 127.
  R power_of_two() const {
    const __m128i exponent = _mm_add_epi32(_mm_cvtps_epi32(r), _mm_set1_epi32(127));
    return {_mm_castsi128_ps(_mm_slli_epi32(exponent, 23))};
  }
  __m128 folded() const { return r; }
  float largest() const {
    const __m128 m = _mm_max_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }

 private:
  static __m128i pairs(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
};

}  // namespace vlora::runtime::VLORA_ISA

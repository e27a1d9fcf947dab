// Splitting rows of x into digits with AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "runtime/register_avx512.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Loads the first `count` values, at most 16. Missing values are zero.
VLORA_INLINE __m512 load_values(const float* x, int64_t count) {
  return R::load_some(x, int(std::clamp<int64_t>(count, 0, R::kWidth))).r;
}

// Calls use(values) with 16 of `count` values at a time. Missing values are zero.
template <class Use>
VLORA_INLINE void for_each_register(const float* x, int64_t count, const Use& use) {
  for (; count > 0; count -= R::kWidth, x += R::kWidth) use(load_values(x, count));
}

// Returns the largest magnitude of x, [count], or NaN if a value is NaN. The bits of magnitudes are
// ordered as integers, and those of NaN are the largest.
VLORA_INLINE float largest_magnitude(const float* x, int64_t count) {
  __m512i largest = _mm512_setzero_si512();
  for_each_register(x, count, [&](__m512 values) __attribute__((always_inline)) {
    largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(values)));
  });
  const uint32_t bits = _mm512_reduce_max_epu32(largest);
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns how many of the values have a magnitude below `limit` and are not zero.
VLORA_INLINE int64_t count_smaller(const float* x, int64_t count, float limit) {
  int64_t smaller = 0;
  for_each_register(x, count, [&](__m512 values) __attribute__((always_inline)) {
    const __m512 magnitudes = _mm512_abs_ps(values);
    const __mmask16 below = _mm512_cmp_ps_mask(magnitudes, _mm512_set1_ps(limit), _CMP_LT_OQ);
    smaller += __builtin_popcount(
        _mm512_mask_cmp_ps_mask(below, magnitudes, _mm512_setzero_ps(), _CMP_GT_OQ));
  });
  return smaller;
}

// Returns the digits of 16 values, of which those from `count` on are zero. Each quarter of the
// register has those of four values: first the lowest digits of the four, then the next digits, and
// so on.
template <int kDigits>
VLORA_INLINE __m512i digits_of(const float* x, int64_t count, float scale) {
  // Adding 128 to each of the lower digits carries into the next digit where a digit of 128 to 255
  // becomes a negative one. The subtraction is an exclusive or.
  const __m512i middle = _mm512_set1_epi32(0x808080 & ((1 << 8 * (kDigits - 1)) - 1));
  const __m512i by_digit = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512 scaled = _mm512_mul_ps(load_values(x, count), _mm512_set1_ps(scale));
  const __m512i integers = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), middle);
  return _mm512_shuffle_epi8(_mm512_xor_si512(integers, middle), by_digit);
}

}  // namespace vlora::quantized::VLORA_ISA

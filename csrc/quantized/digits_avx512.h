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

// Returns the bits of the larger magnitude in each lane: `largest`, or that of the value. The bits
// of magnitudes are ordered as integers, and those of NaN are the largest.
VLORA_INLINE __m512i larger_magnitudes(__m512i largest, __m512 values) {
  return _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(values)));
}
// Returns the largest of 16 magnitudes, or NaN if one is NaN. magnitudes: their bits.
VLORA_INLINE float largest_of(__m512i magnitudes) {
  return _mm_cvtss_f32(
      _mm_castsi128_ps(_mm_cvtsi32_si128(int(_mm512_reduce_max_epu32(magnitudes)))));
}

// Returns the largest magnitude of x, [count], or NaN if a value is NaN.
VLORA_INLINE float largest_magnitude(const float* x, int64_t count) {
  __m512i largest = _mm512_setzero_si512();
  for_each_register(x, count, [&](__m512 values) __attribute__((always_inline)) {
    largest = larger_magnitudes(largest, values);
  });
  return largest_of(largest);
}

// Returns how many of the values have a magnitude below `limit` and are not zero.
VLORA_INLINE int count_smaller(__m512 values, float limit) {
  const __m512 magnitudes = _mm512_abs_ps(values);
  const __mmask16 below = _mm512_cmp_ps_mask(magnitudes, _mm512_set1_ps(limit), _CMP_LT_OQ);
  return __builtin_popcount(
      _mm512_mask_cmp_ps_mask(below, magnitudes, _mm512_setzero_ps(), _CMP_GT_OQ));
}
VLORA_INLINE int64_t count_smaller(const float* x, int64_t count, float limit) {
  int64_t smaller = 0;
  for_each_register(x, count, [&](__m512 values) __attribute__((always_inline)) {
    smaller += count_smaller(values, limit);
  });
  return smaller;
}

// Returns the digits of 16 integers. Each quarter of the register has those of four integers: first
// the lowest digits of the four, then the next digits, and so on.
template <int kDigits>
VLORA_INLINE __m512i split_integers(__m512i integers) {
  // Adding 128 to each of the lower digits carries into the next digit where a digit of 128 to 255
  // becomes a negative one. The subtraction is an exclusive or.
  const __m512i middle = _mm512_set1_epi32(0x808080 & ((1 << 8 * (kDigits - 1)) - 1));
  const __m512i by_digit =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_add_epi32(integers, middle), middle),
                             by_digit);
}

// Returns the digits of 16 scaled values, of which those from `count` on are zero.
template <int kDigits>
VLORA_INLINE __m512i digits_of(const float* x, int64_t count, float scale) {
  return split_integers<kDigits>(
      _mm512_cvtps_epi32(_mm512_mul_ps(load_values(x, count), _mm512_set1_ps(scale))));
}

}  // namespace vlora::quantized::VLORA_ISA

// Splitting rows of x into digits with AVX-512, and combining the sums of digits.
#pragma once

#include "quantized/quantized.h"
#include "runtime/tile_amx.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;
using runtime::kAmxRows;

// Calls use(values) with 16 of `count` values at a time. Missing values are zero.
template <class Use>
VLORA_INLINE void for_each_register(const float* x, int64_t count, const Use& use) {
  for (; count > 0; count -= 16, x += 16)
    use(_mm512_maskz_loadu_ps(first_lanes(int(count)), x));
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

// Writes the digits of 64 values, of which those from `count` on are zero. Each line of a tile gets
// four values: first the lowest digits of the four, then the next digits, and so on.
template <int kDigits>
VLORA_INLINE void write_digits(const float* x, int count, float scale, char* tile) {
  // Adding 128 to each of the lower digits carries into the next digit where a digit of 128 to 255
  // becomes a negative one. The subtraction is an exclusive or.
  const __m512i middle = _mm512_set1_epi32(kDigits == 4 ? 0x808080 : 0x80);
  const __m512i by_digit = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const auto store = [&](__m128i digits) __attribute__((always_inline)) {
    if constexpr (kDigits == 4)
      _mm_store_si128(reinterpret_cast<__m128i*>(tile), digits);
    else
      _mm_storel_epi64(reinterpret_cast<__m128i*>(tile), digits);
    tile += 64;
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, x += 16, count -= 16) {
    const __m512 values = _mm512_maskz_loadu_ps(first_lanes(count), x);
    const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(scale)));
    const __m512i digits = _mm512_shuffle_epi8(
        _mm512_xor_si512(_mm512_add_epi32(integers, middle), middle), by_digit);
    store(_mm512_castsi512_si128(digits));
    store(_mm512_extracti32x4_epi32(digits, 1));
    store(_mm512_extracti32x4_epi32(digits, 2));
    store(_mm512_extracti32x4_epi32(digits, 3));
  }
}

// Writes the products of one row of x with `rows` rows of W. sums: a tile of 16 rows of W. The
// columns from kDigits · row on have the sums of the row's digits, the lowest first.
template <int kDigits>
VLORA_INLINE void store_digit_sums(const int32_t* sums, int row, int rows, const float* scales,
                                   float factor, const float* bias, float* y) {
  constexpr int kInQuarter = 4 / kDigits;
  __m512 columns[4];
  transpose_quarter(reinterpret_cast<const float*>(sums), kAmxRows, row / kInQuarter, columns);
  const __m512* const digits = columns + row % kInQuarter * kDigits;
  const auto sum_of = [&](int digit) __attribute__((always_inline)) {
    return _mm512_cvtepi32_ps(_mm512_castps_si512(digits[digit]));
  };
  __m512 sum = sum_of(kDigits - 1);
#pragma GCC unroll 3
  for (int i = kDigits - 2; i >= 0; --i)
    sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256), sum_of(i));
  const __mmask16 valid = first_lanes(rows);
  sum = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(valid, scales));
  const __m512 biases = bias ? _mm512_maskz_loadu_ps(valid, bias) : _mm512_setzero_ps();
  _mm512_mask_storeu_ps(y, valid, _mm512_fmadd_ps(sum, _mm512_set1_ps(factor), biases));
}

}  // namespace vlora::quantized::VLORA_ISA

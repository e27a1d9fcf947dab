// Writing digits of x to tiles with AVX-512, and combining the sums of digits.
#pragma once

#include "quantized/digits_avx512.h"
#include "quantized/quantized.h"
#include "runtime/tile_amx.h"

namespace vlora::quantized::VLORA_ISA {

using runtime::kAmxRows;

// Writes the digits of 64 values, of which those from `count` on are zero. Each line of a tile gets
// four values: first the lowest digits of the four, then the next digits, and so on.
template <int kDigits>
VLORA_INLINE void write_digits(const float* x, int count, float scale, char* tile) {
  const auto store = [&](__m128i digits) __attribute__((always_inline)) {
    if constexpr (kDigits == 4)
      _mm_store_si128(reinterpret_cast<__m128i*>(tile), digits);
    else
      _mm_storel_epi64(reinterpret_cast<__m128i*>(tile), digits);
    tile += 64;
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, x += 16, count -= 16) {
    const __m512i digits = digits_of<kDigits>(x, count, scale);
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
  for (int i = kDigits - 2; i >= 0; --i) sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256), sum_of(i));
  const __mmask16 valid = first_lanes(rows);
  sum = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(valid, scales));
  const __m512 biases = bias ? _mm512_maskz_loadu_ps(valid, bias) : _mm512_setzero_ps();
  _mm512_mask_storeu_ps(y, valid, _mm512_fmadd_ps(sum, _mm512_set1_ps(factor), biases));
}

}  // namespace vlora::quantized::VLORA_ISA

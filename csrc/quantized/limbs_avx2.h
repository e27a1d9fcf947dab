// Groups of x as integers, for products of bytes. Each value is split into limbs, which are signed
// bytes. Values that are much larger than the rest of their group stay in fp32.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "quantized/quantized.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int kGroup = int(kMinGroup);

// Smallest magnitude that is always an outlier. Below it, the sums of a group are finite.
constexpr float kHuge = 0x1p118f;
// Magnitude that the largest limbs stand for at least, so that the inverse of the scale is finite.
constexpr float kTiny = 0x1p-100f;

// A group of a row of x without its outliers: value i is scale times the sum over limbs l of
// limbs[l][i] * 256^(1 - l).
//
// steps: sum of all values divided by scale, times kZeroStep.
// middle[0]: the sum in units of limb 1 over limbs 0 and 1, times -kMiddle. middle[1]: the same in
//     units of limb 2, over limb 2.
template <int kLimbs>
struct GroupOfX {
  int8_t limbs[kLimbs][kGroup];
  float scale, steps;
  int32_t middle[kLimbs - 1];
};

// A value that is multiplied in fp32, and its index in its row.
struct Outlier {
  int32_t k;
  float value;
};

VLORA_INLINE __m256 magnitude(__m256 values) {
  return _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}

// Returns the largest magnitude in a group. In the order of their bits, infinity exceeds all finite
// numbers, and NaN exceeds infinity.
VLORA_INLINE float largest_magnitude(const __m256 (&values)[kGroup / 8]) {
  __m256i largest = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (const __m256& some : values)
    largest = _mm256_max_epi32(largest, _mm256_castps_si256(magnitude(some)));
  __m128i four =
      _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

VLORA_INLINE int sum_of(__m256i values) {
  __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(four);
}

// Moves outliers of a group whose first value has index k to `outliers`, and leaves zeros. Returns
// the end of the outliers.
//
// A value is an outlier if its magnitude exceeds the sum of the others', or if it is huge or not a
// number. If only one value is not zero, it is no outlier, because no other value loses bits.
inline Outlier* move_outliers(float (&x)[kGroup], int64_t k, Outlier* outliers) {
  for (;;) {
    int largest = 0;
    const auto bits = [&](int i) {
      return _mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(x[i]))) & 0x7fffffff;
    };
    for (int i = 1; i < kGroup; ++i)
      if (bits(i) > bits(largest)) largest = i;
    float rest = 0;
    for (int i = 0; i < kGroup; ++i)
      if (i != largest) rest += std::abs(x[i]);
    const float most = std::abs(x[largest]);
    if (most < kHuge && (most <= rest || rest == 0)) return outliers;
    *outliers++ = {int32_t(k + largest), x[largest]};
    x[largest] = 0;
  }
}

// Splits values without outliers. A value is rounded to a multiple of 2^-23 (three limbs) or 2^-15
// (two) of about the largest magnitude.
template <int kLimbs>
VLORA_INLINE void split(const __m256 (&values)[kGroup / 8], float largest, GroupOfX<kLimbs>& to) {
  // The highest limb is at most 127 even if lower limbs are rounded up.
  constexpr float kUnit = kLimbs == 2 ? 1 : 256, kLargest = 127 * 256 * kUnit;
  const float bound = std::max(largest, kTiny);
  const __m256 inverse = _mm256_set1_ps(kLargest / bound);
  __m256i rest[4], sums[kLimbs];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) rest[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
#pragma GCC unroll 3
  for (int limb = kLimbs - 1; limb >= 0; --limb) {
    __m256i low[4];
    sums[limb] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      low[i] = _mm256_srai_epi32(_mm256_slli_epi32(rest[i], 24), 24);
      rest[i] = _mm256_srai_epi32(_mm256_sub_epi32(rest[i], low[i]), 8);
      sums[limb] = _mm256_add_epi32(sums[limb], low[i]);
    }
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(low[0], low[1]),
                                             _mm256_packs_epi32(low[2], low[3]));
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to.limbs[limb]),
        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
  const int high = sum_of(_mm256_add_epi32(_mm256_slli_epi32(sums[0], 8), sums[1]));
  float sum = float(high);
  to.middle[0] = -int(kMiddle) * high;
  if constexpr (kLimbs == 3) {
    const int low = sum_of(sums[2]);
    to.middle[1] = -int(kMiddle) * low;
    sum += float(low) / kUnit;
  }
  to.steps = sum * kZeroStep;
  to.scale = bound / kLargest * kUnit;
}

// Packs `count` values of a row of x, at most one group, which begins at index k of the row. Returns
// the end of the outliers.
template <int kLimbs>
inline Outlier* pack_group(const float* x, int64_t k, int64_t count, GroupOfX<kLimbs>& to,
                           Outlier* outliers) {
  float some[kGroup] = {};
  if (count < kGroup) {
    for (int64_t i = 0; i < count; ++i) some[i] = x[i];
    x = some;
  }
  __m256 values[4], sum = _mm256_setzero_ps();
  const auto load = [&] {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) values[i] = _mm256_loadu_ps(x + 8 * i);
  };
  load();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sum = _mm256_add_ps(sum, magnitude(values[i]));
  float largest = largest_magnitude(values);
  // False if a value is a NaN.
  if (!(largest < kHuge && 2 * largest <= vlora::runtime::VLORA_ISA::sum_of(R{sum}))) {
    if (x != some) std::copy(x, x + kGroup, some);
    outliers = move_outliers(some, k, outliers);
    x = some;
    load();
    largest = largest_magnitude(values);
  }
  split<kLimbs>(values, largest, to);
  return outliers;
}

}  // namespace vlora::quantized::VLORA_ISA

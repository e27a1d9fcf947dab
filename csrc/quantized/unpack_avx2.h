// Int8 and int4 weights to one AVX2 register of fp32.
#pragma once

#include <immintrin.h>

#include "quantized/quantized.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

VLORA_INLINE R load_bytes(const int8_t* p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

// Returns scale * zero / kZeroStep for `count` groups, at most kWidth, and 0 in the other lanes.
// zeros: distances from 8 in units of kZeroStep; null if each zero is 8.
VLORA_INLINE R scaled_zeros(const float* scales, const int8_t* zeros, int count) {
  constexpr float kMiddleSteps = kMiddle / kZeroStep;
  if (count == R::kWidth) {
    const R middle = R::all(kMiddleSteps);
    return R::load(scales) * (zeros ? load_bytes(zeros) + middle : middle);
  }
  float products[R::kWidth] = {};
  for (int i = 0; i < count; ++i)
    products[i] = scales[i] * (kMiddleSteps + (zeros ? float(zeros[i]) : 0));
  return R::load(products);
}

// A weight is scale * value + offset, where offset = -scale * zero.
struct Factors {
  R scale, offset;
  static VLORA_INLINE Factors of(float scale, float zero) {
    return {R::all(scale), R::all(-scale * zero)};
  }
};

// The 64 values of a block.
struct Nibbles {
  __m256i words[2];
  static VLORA_INLINE Nibbles load(const uint8_t* p) {
    const auto* const halves = reinterpret_cast<const __m128i*>(p);
    return {{_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)),
             _mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))}};
  }
  // Returns weights 8 step … 8 step + 7.
  VLORA_INLINE R weights(const Factors& factors, int step) const {
    const __m256i shifted = _mm256_srli_epi32(words[step % 2], step / 2 * 4);
    const __m256i values = _mm256_and_si256(shifted, _mm256_set1_epi32(15));
    R weights = factors.offset;
    weights.add_product({_mm256_cvtepi32_ps(values)}, factors.scale);
    return weights;
  }
};

#define VLORA_HAS_NIBBLES_IN_PLACE
// The 64 values of a block as 8 words of 32 bits. A value is masked but not shifted, so it is read
// times a power of 16. `place` is the inverse of that power; x is multiplied by it when packed.
struct NibblesInPlace {
  __m256i words;
  static VLORA_INLINE NibblesInPlace load(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
  }
  // Returns values 16 step + 2 i + odd for each lane i, times 1 / place(step, odd).
  VLORA_INLINE R values(int step, int odd) const {
    const int bit = 4 * step + 16 * odd;
    // The highest bits of a word would be converted as a negative number.
    const __m256i bits = bit == 28 ? _mm256_srli_epi32(words, 28)
                                   : _mm256_and_si256(words, _mm256_set1_epi32(15 << bit));
    return {_mm256_cvtepi32_ps(bits)};
  }
  static float place(int step, int odd) {
    const int bit = 4 * step + 16 * odd;
    return bit == 28 ? 1.0f : 1.0f / float(1 << bit);
  }
};

}  // namespace vlora::quantized::VLORA_ISA

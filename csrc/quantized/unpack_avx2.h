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

// Returns x in the lanes in which a < b, and y in the others.
VLORA_INLINE R where_less(R a, R b, R x, R y) {
  return {_mm256_blendv_ps(y.r, x.r, _mm256_cmp_ps(a.r, b.r, _CMP_LT_OQ))};
}

// Returns scale times stored zero for `count` groups, at most kWidth, and 0 in the other lanes.
VLORA_INLINE R scaled_zeros(const float* scales, const int8_t* zeros, int count) {
  if (count == R::kWidth) return R::load(scales) * load_bytes(zeros);
  float products[R::kWidth] = {};
  for (int i = 0; i < count; ++i) products[i] = scales[i] * float(zeros[i]);
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

}  // namespace vlora::quantized::VLORA_ISA

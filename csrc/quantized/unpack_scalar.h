// Int8 and int4 weights to one SSE2 register of fp32.
#pragma once

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

VLORA_INLINE R load_bytes(const int8_t* p) {
  float values[R::kWidth];
  for (int i = 0; i < R::kWidth; ++i) values[i] = p[i];
  return R::load(values);
}

// Returns x in the lanes in which a < b, and y in the others.
VLORA_INLINE R where_less(R a, R b, R x, R y) {
  const __m128 less = _mm_cmplt_ps(a.r, b.r);
  return {_mm_or_ps(_mm_and_ps(less, x.r), _mm_andnot_ps(less, y.r))};
}

// Returns scale times stored zero for `count` groups, at most kWidth, and 0 in the other lanes.
VLORA_INLINE R scaled_zeros(const float* scales, const int8_t* zeros, int count) {
  float products[R::kWidth] = {};
  for (int i = 0; i < count; ++i) products[i] = scales[i] * float(zeros[i]);
  return R::load(products);
}

struct Factors {
  float scale, zero;
  static VLORA_INLINE Factors of(float scale, float zero) { return {scale, zero}; }
};

// The 64 values of a block.
struct Nibbles {
  const uint8_t* words;
  static VLORA_INLINE Nibbles load(const uint8_t* p) { return {p}; }
  // Returns weights kWidth step … kWidth step + kWidth - 1.
  VLORA_INLINE R weights(const Factors& factors, int step) const {
    constexpr int kSteps = 16 / R::kWidth;
    const int nibble = step / kSteps, first = step % kSteps * R::kWidth;
    float values[R::kWidth];
    for (int i = 0; i < R::kWidth; ++i) {
      const int byte = words[2 * (first + i) + nibble / 2];
      values[i] = factors.scale * (float(byte >> nibble % 2 * 4 & 15) - factors.zero);
    }
    return R::load(values);
  }
};

}  // namespace vlora::quantized::VLORA_ISA

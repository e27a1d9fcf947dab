// Quantization of a group of values of x to int8, for every instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quantized/digits.h"

namespace vlora::quantized::VLORA_ISA {

// Writes the integers of a group, of which `count` values exist. Compilers turn the loops into
// vectors, because they have constant bounds and no calls.
template <size_t kGroup>
inline void quantize_group(const float* x, int64_t count, int8_t (&integers)[kGroup], float* unit) {
  float padded[kGroup];
  if (count < int64_t(kGroup)) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, x, size_t(count) * sizeof(float));
    x = padded;
  }
  const auto bits_of = [](float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  };
  // The bits of magnitudes are ordered as the magnitudes, and those of NaN are the largest.
  uint32_t largest_bits = 0;
  for (size_t i = 0; i < kGroup; ++i)
    largest_bits = std::max(largest_bits, bits_of(x[i]) & 0x7fffffffu);
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const bool finite = largest < INFINITY;
  *unit = finite ? std::max(largest, kSmallestMaximum) / 127.0f : NAN;
  const float scale = finite ? 1 / *unit : 0;
  // The sum with this number has no bits after the point, and ends with those of the integer.
  constexpr float kRounding = 0x1.8p23f;
  for (size_t i = 0; i < kGroup; ++i) integers[i] = int8_t(bits_of(x[i] * scale + kRounding));
}

template <size_t kGroup>
inline int32_t sum_of(const int8_t (&integers)[kGroup]) {
  int32_t sum = 0;
  for (size_t i = 0; i < kGroup; ++i) sum += integers[i];
  return sum;
}

}  // namespace vlora::quantized::VLORA_ISA

// Splitting rows of x into digits in plain C++, and combining the sums of digits: the equivalent of
// digits_amx.h.
#pragma once

#include <cmath>

#include "quantized/quantized.h"
#include "runtime/tile_twin.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;
using runtime::kAmxRows;

inline float largest_magnitude(const float* x, int64_t count) {
  float largest = 0;
  for (int64_t k = 0; k < count; ++k)
    if (!(std::abs(x[k]) <= largest)) largest = std::abs(x[k]) + (largest - largest);
  return largest;
}

inline int64_t count_smaller(const float* x, int64_t count, float limit) {
  int64_t smaller = 0;
  for (int64_t k = 0; k < count; ++k) smaller += x[k] != 0 && std::abs(x[k]) < limit;
  return smaller;
}

template <int kDigits>
void write_digits(const float* x, int count, float scale, char* tile) {
  for (int k = 0; k < kBlock; ++k) {
    const float scaled = k < count ? x[k] * scale : 0;
    int64_t rest = std::isnan(scaled) ? 0 : std::llrint(scaled);
    for (int digit = 0; digit < kDigits; ++digit) {
      const auto signed_digit = int8_t(rest & 255);
      tile[k / 4 * 64 + digit * 4 + k % 4] = char(signed_digit);
      rest = (rest - signed_digit) / 256;
    }
  }
}

template <int kDigits>
void store_digit_sums(const int32_t* sums, int row, int rows, const float* scales, float factor,
                      const float* bias, float* y) {
  for (int n = 0; n < rows; ++n) {
    double sum = 0;
    for (int digit = kDigits - 1; digit >= 0; --digit)
      sum = sum * 256 + sums[n * kAmxRows + row * kDigits + digit];
    y[n] = float(sum) * scales[n] * factor + (bias ? bias[n] : 0);
  }
}

}  // namespace vlora::quantized::VLORA_ISA

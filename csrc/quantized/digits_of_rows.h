// Digits of whole rows of x, for int8 weights with one scale for each output.
//
// A row of x is multiplied by a factor, so that its values become integers of 8 kDigits bits. Each
// integer is split into kDigits signed bytes. Sums of products of bytes are exact, and kDigits of
// them make a sum of x. The error of a value of x is at most about 2^(-8 kDigits) times the largest
// value of its row. About 2^-23 times the value itself is added when it is scaled.
//
// Included after largest_magnitude and count_smaller (digits_avx512.h or digits_twin.h).
#pragma once

#include <algorithm>
#include <cmath>

#include "quantized/digits.h"

namespace vlora::quantized::VLORA_ISA {

// How a row of x becomes integers, and back.
struct RowScale {
  float scale;   // of x; 0 if a value of the row is not finite
  float factor;  // of the sums of the integers; NaN if a value of the row is not finite
};

template <int kDigits>
RowScale row_scale(const float* x, int64_t count) {
  const float largest = largest_magnitude(x, count);
  if (!(largest < INFINITY)) return {0, NAN};  // or NaN
  const float unit = std::max(largest, kSmallestMaximum) / largest_integer(kDigits);
  return {1 / unit, unit};
}

// Returns the fewest digits, at most `most`, that represent most values of each row about as
// exactly as the type of the product does, or 0. Values that are not finite are not considered,
// because they spoil the product of their row anyway.
inline int fewest_digits(const Product& p, Dtype dtype, int most) {
  const float max_error = kMaxError[int(dtype)];
  int digits = kMinDigits;
  while (error_of_largest(digits) > max_error) ++digits;
  for (int64_t t = 0; t < p.rows; ++t) {
    const float* const x = p.x + t * p.x_stride;
    const float largest = std::max(largest_magnitude(x, p.w.k), kSmallestMaximum);
    const auto suffice = [&] {
      const float limit = largest * (error_of_largest(digits) / max_error);
      return kMaxSmallShare * count_smaller(x, p.w.k, limit) <= p.w.k;
    };
    while (largest < INFINITY && digits <= most && !suffice()) ++digits;
    if (digits > most) return 0;
  }
  return digits;
}

}  // namespace vlora::quantized::VLORA_ISA

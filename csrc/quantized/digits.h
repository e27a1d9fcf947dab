// Rows of x as integers that are split into signed bytes, their digits: constants of the kernels
// that multiply digits.
#pragma once

#include "quantized/quantized.h"

namespace vlora::quantized {

// Digits are used if at most one in kMaxSmallShare values of a row has a larger relative error than
// this, by type of the product: somewhat more than that of a sum in fp32, or that of rounding to
// bf16.
constexpr float kMaxError[kDtypes] = {0x1p-20f, 0x1p-9f};
constexpr int64_t kMaxSmallShare = 4;
// Rows of smaller values lose bits, so that factors are normal numbers.
constexpr float kSmallestMaximum = 1e-27f;

// Largest integer that is split: its digits do not exceed 127.
constexpr float largest_integer(int digits) { return 127.0f * float(1 << 8 * (digits - 1)); }
// Error of a value, divided by the largest value that is split with the same factor.
constexpr float error_of_largest(int digits) { return 1.0f / float(int64_t(1) << 8 * digits); }

}  // namespace vlora::quantized

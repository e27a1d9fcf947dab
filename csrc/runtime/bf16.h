// Conversions between fp32 and bf16 in plain C++.
#pragma once

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

inline float fp32_of(uint16_t bf16) {
  const uint32_t bits = uint32_t(bf16) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns the nearest bf16, ties to even. A NaN keeps its sign and stays a NaN.
inline uint16_t bf16_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits | 0x00400000u) >> 16);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Removes the upper half of the value's bits and returns it as a bf16. The subtraction is exact. A
// value that is not finite becomes a NaN.
inline uint16_t take_upper_half(float& value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const uint16_t upper = uint16_t(bits >> 16);
  value -= fp32_of(upper);
  return upper;
}

}  // namespace vlora::runtime::VLORA_ISA

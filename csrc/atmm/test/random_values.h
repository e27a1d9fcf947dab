// Random values for all checks.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>

#include "runtime/types.h"

inline std::mt19937_64& random_bits() {
  static thread_local std::mt19937_64 bits{std::random_device{}()};
  return bits;
}

// Returns a random integer in [low, high].
inline int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits());
}

// Returns one of some values.
template <class T>
T any_of(std::initializer_list<T> values) {
  return values.begin()[draw(0, int64_t(values.size()) - 1)];
}

// Returns the value stored at `p`.
inline float value_at(const char* p, vlora::Dtype dtype) {
  float value;
  if (dtype == vlora::Dtype::kFp32) {
    std::memcpy(&value, p, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t bits = uint32_t(half) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A buffer of exactly `count` normally distributed values.
struct Values {
  vlora::Dtype dtype;
  size_t count;
  std::unique_ptr<char[]> bytes;

  Values(vlora::Dtype type, int64_t n, float scale)
      : dtype(type), count(size_t(n)), bytes(new char[std::max<size_t>(1, count * size_of(type))]) {
    std::normal_distribution<float> normal(0, scale);
    for (size_t i = 0; i < count; ++i) {
      const float value = normal(random_bits());
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      const uint16_t half = uint16_t(bits >> 16);
      if (dtype == vlora::Dtype::kFp32)
        std::memcpy(&bytes[i * 4], &value, 4);
      else
        std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  double operator[](int64_t i) const { return value_at(&bytes[size_t(i) * size_of(dtype)], dtype); }
};

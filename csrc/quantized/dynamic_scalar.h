// Products of bytes in plain C++ (dynamic_vectors.h).
#pragma once

#include <cstring>

#include "quantized/dynamic.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

struct Bytes {
  static constexpr int kTileRows = 4;
  static constexpr int64_t kLineBytes = kBlock;
  static constexpr bool kAddsOffsets = false;
  static constexpr int kParts = 1;
  static constexpr int64_t kAhead = 1024;  // see bytes_ahead
  using Weights = const int8_t*;
  using Quad = const int8_t*;
  struct Sums {
    int32_t of[kDynamicPanel];
  };

  static void write_line(const int8_t* integers, char* line) {
    std::memcpy(line, integers, size_t(kBlock));
  }
  static Sums initial(const int32_t*) { return {}; }
  static Weights load(const uint8_t* w, int) { return reinterpret_cast<const int8_t*>(w); }
  static Quad quad(const char* x, int) { return reinterpret_cast<const int8_t*>(x); }
  static void add(Sums& sums, Weights weights, Quad four) {
    for (int i = 0; i < 4 * kDynamicPanel; ++i) sums.of[i / 4] += int32_t(weights[i]) * four[i % 4];
  }
  static V to_floats(const Sums& sums) {
    float values[kDynamicPanel];
    for (int i = 0; i < kDynamicPanel; ++i) values[i] = float(sums.of[i]);
    return V::load(values);
  }
  template <class T>
  static void keep(T& value) {
    asm volatile("" : "+m"(value));
  }
};

}  // namespace vlora::quantized::VLORA_ISA

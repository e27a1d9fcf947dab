// Products of int4 with bytes of x in plain C++ (dynamic_int4_rows.h).
#pragma once

#include "quantized/dynamic_int4.h"
#include "quantized/unpack_scalar.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int64_t kPrefetchedBytes = 0;

struct Int4Bytes {
  static constexpr int kTileRows = 4;
  using Line = const uint8_t*;
  using Quad = const int8_t*;
  struct Sums {
    int32_t of[kDynamicPanel];
  };
  using Part = Sums;

  static Line load(const uint8_t* w) { return w; }
  static Quad quad(const char* x) { return reinterpret_cast<const int8_t*>(x); }
  static Sums zero() { return {}; }
  static Part begin(const Sums& sums) { return sums; }
  static void add(Part& sums, Line line, int half, Quad four) {
    for (int i = 0; i < 4 * kDynamicPanel; ++i)
      sums.of[i / 4] += (line[i] >> 4 * half & 15) * four[i % 4];
  }
  static void end(Sums& sums, const Part& part) { sums = part; }
  static V to_floats(const Sums& sums) {
    float values[kDynamicPanel];
    for (int i = 0; i < kDynamicPanel; ++i) values[i] = float(sums.of[i]);
    return V::load(values);
  }
};

}  // namespace vlora::quantized::VLORA_ISA

// Int8 and int4 weights as lines of bf16 tiles in plain C++: the equivalent of lines_amx.h.
#pragma once

#include "quantized/quantized.h"
#include "runtime/bf16.h"

namespace vlora::quantized::VLORA_ISA {

// Writes weights as lines. weight(k): the weight at depth k.
template <class WeightAt>
void write_lines(int64_t block, int64_t count, bool interleaved, char* to, ptrdiff_t tile_bytes,
                 const WeightAt& weight) {
  for (int64_t i = 0; i < count * kBlock; ++i) {
    const int64_t in_line = i % kMinGroup, half = kMinGroup / 2;
    const int64_t at = interleaved ? in_line % half * 2 + in_line / half : in_line;
    const uint16_t bf16 = runtime::VLORA_ISA::bf16_of(weight(block * kBlock + i));
    __builtin_memcpy(to + i / kMinGroup * tile_bytes + at * 2, &bf16, sizeof bf16);
  }
}

struct Int4Lines {
  static constexpr bool kIntegers = false, kInterleaved = false;
  static void write(const Weight& w, int64_t row, int64_t block, int64_t count, int64_t, char* to,
                    ptrdiff_t tile_bytes) {
    const uint8_t* const values = w.values + row * w.row_bytes();
    write_lines(block, count, kInterleaved, to, tile_bytes, [&](int64_t k) {
      const int64_t group = row * w.groups() + (k >> w.group_shift), nibble = k % kBlock / 16;
      const int byte = values[k / kBlock * kBlock / 2 + k % 16 * 2 + nibble / 2];
      const float zero = w.zeros ? w.zero(group) : kMiddle;
      return (float(byte >> nibble % 2 * 4 & 15) - zero) * w.scales[group];
    });
  }
};

template <bool grouped>
struct Int8Lines {
  static constexpr bool kIntegers = !grouped, kInterleaved = !grouped;
  static void write(const Weight& w, int64_t row, int64_t block, int64_t count, int64_t, char* to,
                    ptrdiff_t tile_bytes) {
    const auto* const values = reinterpret_cast<const int8_t*>(w.values + row * w.row_bytes());
    const float* const scales = w.scales + row * w.groups();
    write_lines(block, count, kInterleaved, to, tile_bytes, [&](int64_t k) {
      return grouped ? float(values[k]) * scales[k >> w.group_shift] : float(values[k]);
    });
  }
};

}  // namespace vlora::quantized::VLORA_ISA

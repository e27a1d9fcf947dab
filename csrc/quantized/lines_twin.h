// Int8 weights, and the integers of int4 in panels, as lines of bf16 tiles in plain C++: the
// equivalent of lines_amx.h.
#pragma once

#include "quantized/quantized.h"
#include "quantized/unpack_scalar.h"
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

class IntegerTable {
 public:
  void convert(const uint8_t* from, char* to) const {
    write(from, to, [](float integer, int) { return integer; });
  }
  void convert_scaled(const uint8_t* from, const float* scales, const float* offsets,
                      char* to) const {
    write(from, to, [&](float integer, int row) { return scales[row] * integer + offsets[row]; });
  }

 private:
  template <class WeightOf>
  static void write(const uint8_t* from, char* to, const WeightOf& weight_of) {
    for (int i = 0; i < 4; ++i)
      for (int at = 0; at < 32; ++at) {
        const int value = from[2 * at + i / 2] >> i % 2 * 4 & 15;
        const uint16_t bf16 =
            runtime::VLORA_ISA::bf16_of(weight_of(float(value) - kMiddle, at / 2));
        __builtin_memcpy(to + 64 * i + 2 * at, &bf16, sizeof bf16);
      }
  }
};

}  // namespace vlora::quantized::VLORA_ISA

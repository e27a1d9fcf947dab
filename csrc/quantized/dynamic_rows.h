// Quantization of rows of x, and the loop over panels of W, for every instruction set. Included
// after a struct Bytes that multiplies bytes (dynamic_scalar.h and so on).
#pragma once

#include <xmmintrin.h>

#include <algorithm>
#include <cstring>

#include "quantized/dynamic.h"
#include "quantized/quantize_group.h"
#include "runtime/machine.h"
#include "runtime/scratch.h"

namespace vlora::quantized::VLORA_ISA {

// A product of a panel of W with one tile of rows of x.
struct DynamicTile {
  const uint8_t* w;
  const float *scales, *bias;
  const char* lines;
  const float* units;
  const int32_t* offsets;
  int64_t blocks, groups;
  float* y;
  ptrdiff_t y_stride;
  bool streaming;  // whether y bypasses the caches
};

inline void pack_dynamic(const Product& p, const DynamicRows& x, int64_t from, int64_t until) {
  constexpr int64_t kBlocks = kDynamicGroup / kBlock;
  for (int64_t tile = from; tile < until; ++tile) {
    const int64_t begin = dynamic_tile_begin(p, x, tile), end = dynamic_tile_begin(p, x, tile + 1);
    const int64_t block_bytes = (end - begin) * Bytes::kLineBytes;
    for (int64_t t = begin; t < end; ++t) {
      char* line = x.lines + (begin * x.blocks + t - begin) * Bytes::kLineBytes;
      for (int64_t group = 0; group < x.groups; ++group) {
        const int64_t k = group * kDynamicGroup, at = t * x.groups + group;
        int8_t integers[kDynamicGroup];
        const float* const values = p.x + t * p.x_stride + k;
        quantize_group(values, std::min(kDynamicGroup, p.w.k - k), integers, x.units + at);
        if constexpr (Bytes::kAddsOffsets) x.offsets[at] = -128 * sum_of(integers);
        for (int64_t i = 0; i < std::min(kBlocks, x.blocks - group * kBlocks); ++i) {
          Bytes::write_line(integers + i * kBlock, line);
          line += block_bytes;
        }
      }
    }
  }
}

// Returns the rows of W that fill no panel as a panel, with zeros in the place of missing rows.
inline const uint8_t* last_panel(const Weight& w) {
  static thread_local runtime::Scratch scratch;
  const int64_t row_bytes = w.row_bytes(), first = w.n / kDynamicPanel * kDynamicPanel;
  auto* const panel = reinterpret_cast<uint8_t*>(scratch.get(kDynamicPanel * row_bytes / 4));
  std::memset(panel, 0, size_t(kDynamicPanel * row_bytes));
  for (int64_t row = first; row < w.n; ++row)
    for (int64_t i = 0; i < row_bytes; i += 4)
      std::memcpy(panel + i * kDynamicPanel + (row - first) * 4, w.values + row * row_bytes + i, 4);
  return panel;
}

// Calls multiply(tile, rows) for panels [from, to) with all tiles of x.
template <class Multiply>
void for_each_dynamic_tile(const Product& p, const DynamicRows& x, int64_t from, int64_t to,
                           const Multiply& multiply) {
  const int64_t full = p.w.n / kDynamicPanel, panel_bytes = kDynamicPanel * p.w.row_bytes();
  static constexpr float kZeros[kDynamicPanel] = {};
  const bool writes_lines = reinterpret_cast<uintptr_t>(p.y) % 64 == 0 && p.y_stride % kLanes == 0,
             streaming = writes_lines && p.rows * p.w.n * 4 > runtime::machine().l2;
  const auto multiply_tiles = [&](DynamicTile tile) {
    float* const y = tile.y;
    for (int64_t i = 0; i < x.tiles; ++i) {
      const int64_t begin = dynamic_tile_begin(p, x, i);
      tile.lines = x.lines + begin * x.blocks * Bytes::kLineBytes;
      tile.units = x.units + begin * x.groups;
      tile.offsets = x.offsets + begin * x.groups;
      tile.y = y + begin * tile.y_stride;
      multiply(tile, dynamic_tile_begin(p, x, i + 1) - begin);
    }
  };
  for (int64_t panel = from; panel < std::min(to, full); ++panel) {
    const int64_t n = panel * kDynamicPanel;
    multiply_tiles({p.w.values + panel * panel_bytes, p.w.scales + n, p.bias ? p.bias + n : kZeros,
                    nullptr, nullptr, nullptr, x.blocks, x.groups, p.y + n, p.y_stride, streaming});
  }
  if (streaming) _mm_sfence();
  if (to <= full) return;
  const int64_t n = full * kDynamicPanel, count = p.w.n - n;
  static thread_local runtime::Scratch scratch;
  float* const y = scratch.get(p.rows * kDynamicPanel);
  float scales[kDynamicPanel] = {}, bias[kDynamicPanel] = {};
  std::copy_n(p.w.scales + n, count, scales);
  if (p.bias) std::copy_n(p.bias + n, count, bias);
  multiply_tiles({last_panel(p.w), scales, bias, nullptr, nullptr, nullptr, x.blocks, x.groups, y,
                  kDynamicPanel, false});
  for (int64_t t = 0; t < p.rows; ++t)
    std::copy_n(y + t * kDynamicPanel, count, p.y + t * p.y_stride + n);
}

// Adds unit * sums in fp32.
VLORA_INLINE void add_scaled(V& total, const V& sums, float unit) {
#pragma GCC unroll 4
  for (int i = 0; i < V::kRegisters; ++i) total.r[i] = total.r[i] + sums.r[i] * R::all(unit);
}

// Writes bias + scale * total.
VLORA_INLINE void write_outputs(const V& total, const float* scales, const float* bias, float* y,
                                bool streaming) {
  V result = V::load(bias);
  const V scale = V::load(scales);
#pragma GCC unroll 4
  for (int i = 0; i < V::kRegisters; ++i) result.r[i] = result.r[i] + total.r[i] * scale.r[i];
  streaming ? result.stream(y) : result.store(y);
}

}  // namespace vlora::quantized::VLORA_ISA

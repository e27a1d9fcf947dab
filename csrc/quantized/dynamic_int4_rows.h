// Quantization of rows of x, and the loop over panels of int4 weights, for every instruction set
// (dynamic_int4.h). Included after a struct Int4Bytes (dynamic_int4_scalar.h and so on).
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "quantized/dynamic_int4.h"
#include "quantized/quantize.h"
#include "quantized/quantize_group.h"
#include "runtime/scratch.h"

namespace vlora::quantized::VLORA_ISA {

// Values of a row of W in a line of 64 bytes of a panel.
constexpr int kLineValues = 8, kLineBytes = 64;

template <int kGroup>
void pack_int4_rows(const Product& p, const Int4Rows& x, int64_t from, int64_t until) {
  for (int64_t tile = from; tile < until; ++tile) {
    const int64_t begin = p.rows * tile / x.tiles, rows = p.rows * (tile + 1) / x.tiles - begin;
    char* to = x.packed + begin * x.row_bytes();
    for (int64_t k = 0; k < x.groups * kGroup; k += kGroup) {
      auto* const scales = reinterpret_cast<GroupScale*>(to + rows * kGroup);
      for (int64_t row = 0; row < rows; ++row, to += kGroup) {
        int8_t integers[kGroup];
        const int64_t count = std::clamp<int64_t>(p.w.k - k, 0, kGroup);
        quantize_group(p.x + (begin + row) * p.x_stride + k, count, integers, &scales[row].unit);
        scales[row].negated = float(-sum_of(integers));
        for (int i = 0; i < kGroup; ++i)
          to[i / kLineValues * kLineValues + packed_place(i % kLineValues)] = char(integers[i]);
      }
      to = reinterpret_cast<char*>(scales + rows);
    }
  }
}

// Multiplies a panel with a tile of T rows.
template <int kGroup, int T>
void multiply_int4_tile(const Product& p, int64_t panel, const char* x, int64_t row) {
  const uint8_t* w = p.w.values + panel * kDynamicPanel * p.w.row_bytes();
  const int64_t groups = p.w.blocks() * (kBlock / kGroup);
  V totals[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) totals[t] = V::zero();
  for (int64_t group = 0; group < groups; ++group) {
    Int4Bytes::Sums sums[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sums[t] = Int4Bytes::zero();
#pragma GCC unroll 2
    for (int k = 0; k < kGroup; k += int(kMinGroup)) {
      Int4Bytes::Part parts[T];
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) parts[t] = Int4Bytes::begin(sums[t]);
#pragma GCC unroll 4
      for (int line = 0; line < int(kMinGroup) / kLineValues; ++line, w += kLineBytes) {
        __builtin_prefetch(w + kPrefetchedBytes, 0, 3);
        const Int4Bytes::Line values = Int4Bytes::load(w);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t)
            Int4Bytes::add(parts[t], values, half,
                           Int4Bytes::quad(x + t * kGroup + half * kLineValues / 2));
        x += kLineValues;
      }
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) Int4Bytes::end(sums[t], parts[t]);
    }
    x += (T - 1) * kGroup;
    const auto* const rows = reinterpret_cast<const GroupScale*>(x);
    x += T * sizeof(GroupScale);
    const int64_t index =
        (panel * p.w.groups() + (group * kGroup >> p.w.group_shift)) * kDynamicPanel;
    const V scale = V::load(p.w.scales + index);
    V zero;
#pragma GCC unroll 4
    for (int j = 0; j < V::kRegisters; ++j) {
      zero.r[j] = R::all(kMiddle);
      if (p.w.zeros)
        zero.r[j].add_product(load_bytes(p.w.zeros + index + j * R::kWidth), R::all(kZeroStep));
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      V sum = Int4Bytes::to_floats(sums[t]);
#pragma GCC unroll 4
      for (int j = 0; j < V::kRegisters; ++j) {
        // Exact, so whether it is fused makes no difference.
        sum.r[j].add_product(zero.r[j], R::all(rows[t].negated));
        totals[t].r[j] = totals[t].r[j] + sum.r[j] * R::all(rows[t].unit) * scale.r[j];
      }
    }
  }
  const int64_t n = panel * kDynamicPanel;
  const V bias = p.bias ? V::load(p.bias + n) : V::zero();
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    V result = bias;
    result.add(totals[t]);
    result.store(p.y + (row + t) * p.y_stride + n);
  }
}

using Int4Tile = void (*)(const Product&, int64_t panel, const char* x, int64_t row);

// The kernels for 1, 2 and so on rows of x.
template <int kGroup, int... T>
VLORA_INLINE auto int4_tiles_of(std::integer_sequence<int, T...>) {
  static constexpr Int4Tile kTiles[] = {multiply_int4_tile<kGroup, T + 1>...};
  return kTiles;
}

// Multiplies panels [from, to) of a matrix whose rows fill panels.
template <int kGroup>
void multiply_int4_panels(const Product& p, const Int4Rows& x, int64_t from, int64_t to) {
  const Int4Tile* const tiles =
      int4_tiles_of<kGroup>(std::make_integer_sequence<int, Int4Bytes::kTileRows>());
  for (int64_t panel = from; panel < to; ++panel)
    for (int64_t tile = 0; tile < x.tiles; ++tile) {
      const int64_t row = p.rows * tile / x.tiles, rows = p.rows * (tile + 1) / x.tiles - row;
      tiles[rows - 1](p, panel, x.packed + row * x.row_bytes(), row);
    }
}

// Multiplies the rows of W that fill no panel, from `first` on, as a panel with missing rows.
template <int kGroup>
void multiply_last_int4_rows(const Product& p, const Int4Rows& x, int64_t first) {
  static thread_local runtime::Scratch scratch;
  const int64_t count = p.w.n - first, groups = p.w.groups(), row_bytes = p.w.row_bytes(),
                floats = kDynamicPanel * (groups + row_bytes / 4 + ceil_div(groups, 4) + p.rows);
  float* const scales = scratch.get(floats);
  std::fill(scales, scales + floats, 0.0f);
  float* const y = scales + kDynamicPanel * groups;
  auto* const values = reinterpret_cast<uint8_t*>(y + kDynamicPanel * p.rows);
  auto* const zeros = reinterpret_cast<int8_t*>(values + kDynamicPanel * row_bytes);
  float bias[kDynamicPanel] = {};
  std::copy_n(p.w.scales + first * groups, count * groups, scales);
  std::copy_n(p.w.values + first * row_bytes, count * row_bytes, values);
  if (p.w.zeros) std::copy_n(p.w.zeros + first * groups, count * groups, zeros);
  if (p.bias) std::copy_n(p.bias + first, count, bias);
  interleave(4, values, scales, zeros, kDynamicPanel, row_bytes, groups, kDynamicPanel, 1);
  Product panel = p;
  panel.w.values = values;
  panel.w.scales = scales;
  if (p.w.zeros) panel.w.zeros = zeros;
  panel.w.n = kDynamicPanel;
  panel.bias = bias;
  panel.y = y;
  panel.y_stride = kDynamicPanel;
  multiply_int4_panels<kGroup>(panel, x, 0, 1);
  for (int64_t t = 0; t < p.rows; ++t)
    std::copy_n(y + t * kDynamicPanel, count, p.y + t * p.y_stride + first);
}

template <int kGroup>
void run_int4_group(const Product& p, const Int4Rows& x, int64_t from, int64_t to) {
  const int64_t full = p.w.n / kDynamicPanel;
  multiply_int4_panels<kGroup>(p, x, from, std::min(to, full));
  if (to > full) multiply_last_int4_rows<kGroup>(p, x, full * kDynamicPanel);
}

inline Int4Kernels int4_kernels_of_vectors() {
  return {Int4Bytes::kTileRows,
          [](const Product& p, const Int4Rows& x, int64_t from, int64_t until) {
            (x.group == kMinGroup ? pack_int4_rows<kMinGroup>
                                  : pack_int4_rows<kDynamicGroup>)(p, x, from, until);
          },
          [](const Product& p, const Int4Rows& x, int64_t from, int64_t to) {
            (x.group == kMinGroup ? run_int4_group<kMinGroup>
                                  : run_int4_group<kDynamicGroup>)(p, x, from, to);
          }};
}

}  // namespace vlora::quantized::VLORA_ISA

// Kernels of vectors for products of bytes (dynamic.h). Included after dynamic_rows.h.
#pragma once

#include <utility>

#include "quantized/dynamic_rows.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int kQuads = int(kBlock) / 4;  // of 4 values in a block

template <int P, int T>
void multiply_dynamic_tile(const DynamicTile& tile) {
  V totals[P][T];
  const uint8_t* w[P];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    w[p] = tile.w + p * tile.panel_bytes;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) totals[p][t] = V::zero();
  }
  const char* x = tile.lines;
  int64_t blocks = tile.blocks;
  for (int64_t group = 0; group < tile.groups; ++group) {
    Bytes::Sums sums[P][T];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t)
        sums[p][t] = Bytes::initial(tile.offsets + t * tile.groups + group);
    for (int i = 0; i < int(kDynamicGroup / kBlock) && blocks > 0; ++i, --blocks) {
      // After its last block, a panel is followed by the one after all P.
      const int64_t ahead = kPrefetchedBytes + (blocks > 1 ? 0 : (P - 1) * tile.panel_bytes);
      for (int quad = 0; quad < kQuads; ++quad) {
        Bytes::Weights weights[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          __builtin_prefetch(w[p] + ahead, 0, 3);
          weights[p] = Bytes::load(w[p]);
          w[p] += 4 * kDynamicPanel;
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const auto four = Bytes::quad(x + t * Bytes::kLineBytes);
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) Bytes::add(sums[p][t], weights[p], four);
        }
        x += Bytes::kLineBytes / kQuads;
      }
      x += (T - 1) * Bytes::kLineBytes;
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t)
        add_scaled(totals[p][t], Bytes::to_floats(sums[p][t]), tile.units[t * tile.groups + group]);
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
      write_outputs(totals[p][t], tile.scales + p * kDynamicPanel, tile.bias + p * kDynamicPanel,
                    tile.y + t * tile.y_stride + p * kDynamicPanel, tile.streaming);
}

// The kernels for P panels and 1, 2 and so on rows of x.
template <int P, int... T>
VLORA_INLINE auto dynamic_tiles_of(std::integer_sequence<int, T...>) {
  static constexpr void (*kTiles[])(const DynamicTile&) = {multiply_dynamic_tile<P, T + 1>...};
  return kTiles;
}

inline void run_dynamic(const Product& p, const DynamicRows& x, int64_t from, int64_t to) {
  using Rows = std::make_integer_sequence<int, Bytes::kTileRows>;
  using FewRows = std::make_integer_sequence<int, Bytes::kFewRows>;
  const bool few = p.rows <= Bytes::kFewRows;
  const auto one = dynamic_tiles_of<1>(Rows()), all = dynamic_tiles_of<Bytes::kPanels>(Rows()),
             wide = dynamic_tiles_of<Bytes::kPanelsOfFewRows>(FewRows());
  for_each_dynamic_tile(p, x, from, to, few ? Bytes::kPanelsOfFewRows : Bytes::kPanels,
                        [&](const DynamicTile& tile, int64_t rows, int panels) {
                          (panels == 1 ? one : few ? wide : all)[rows - 1](tile);
                        });
}

inline double byte_peak(int64_t rounds) {
  constexpr int kSums = Bytes::kTileRows * Bytes::kPanels;
  alignas(64) const uint8_t zeros[4 * kDynamicPanel * 2] = {};
  auto weights = Bytes::load(zeros);
  const auto four = Bytes::quad(reinterpret_cast<const char*>(zeros));
  const int32_t offset = 0;
  Bytes::Sums sums[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sums[i] = Bytes::initial(&offset);
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      Bytes::keep(weights);
      Bytes::add(sums[i], weights, four);
      Bytes::keep(sums[i]);
    }
  volatile float sink = 0;
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sink = sink + Bytes::to_floats(sums[i]).sum();
  return double(rounds) * kSums * 2 * 4 * kDynamicPanel;
}

inline DynamicKernels dynamic_kernels_of_vectors() {
  return {Bytes::kTileRows, Bytes::kLineBytes, pack_dynamic, run_dynamic, byte_peak};
}

}  // namespace vlora::quantized::VLORA_ISA

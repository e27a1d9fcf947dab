// Kernels of vectors for products of bytes (dynamic.h). Included after dynamic_rows.h.
#pragma once

#include <utility>

#include "quantized/dynamic_rows.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int kQuads = int(kBlock) / 4;  // of 4 values in a block, each in Bytes::kParts parts

// Returns how many bytes W is prefetched ahead, for T rows of x. CPUs read fast enough on their own
// for few rows, and a large distance disturbs them. With more rows, W must be a memory's latency
// ahead.
constexpr int64_t bytes_ahead(int T) { return T <= 4 ? Bytes::kAhead : 8192; }

// Multiplies a panel with T rows of x.
template <int T>
void multiply_dynamic_tile(const DynamicTile& tile) {
  V totals[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) totals[t] = V::zero();
  const uint8_t* w = tile.w;
  const char* x = tile.lines;
  int64_t blocks = tile.blocks;
  for (int64_t group = 0; group < tile.groups; ++group) {
    Bytes::Sums sums[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sums[t] = Bytes::initial(tile.offsets + t * tile.groups + group);
    for (int i = 0; i < int(kDynamicGroup / kBlock) && blocks > 0; ++i, --blocks) {
      for (int quad = 0; quad < kQuads; ++quad, w += 4 * kDynamicPanel) {
        // Into L2, since prefetching into L1 takes Zen 4 1.3 times as long.
        __builtin_prefetch(w + bytes_ahead(T), 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < Bytes::kParts; ++part) {
          const Bytes::Weights weights = Bytes::load(w, part);
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t)
            Bytes::add(sums[t], weights, Bytes::quad(x + t * Bytes::kLineBytes, part));
        }
        x += Bytes::kLineBytes / kQuads;
      }
      x += (T - 1) * Bytes::kLineBytes;
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
      add_scaled(totals[t], Bytes::to_floats(sums[t]), tile.units[t * tile.groups + group]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
    write_outputs(totals[t], tile.scales, tile.bias, tile.y + t * tile.y_stride, tile.streaming);
}

// The kernels for 1, 2 and so on rows of x.
template <int... T>
VLORA_INLINE auto dynamic_tiles_of(std::integer_sequence<int, T...>) {
  static constexpr void (*kTiles[])(const DynamicTile&) = {multiply_dynamic_tile<T + 1>...};
  return kTiles;
}

inline void run_dynamic(const Product& p, const DynamicRows& x, int64_t from, int64_t to) {
  const auto tiles = dynamic_tiles_of(std::make_integer_sequence<int, Bytes::kTileRows>());
  for_each_dynamic_tile(p, x, from, to,
                        [&](const DynamicTile& tile, int64_t rows) { tiles[rows - 1](tile); });
}

inline double byte_peak(int64_t rounds) {
  constexpr int kSums = Bytes::kTileRows;
  alignas(64) const uint8_t zeros[4 * kDynamicPanel] = {};
  const uint8_t* bytes = zeros;
  asm("" : "+r"(bytes));  // Else the compiler knows the products.
  auto weights = Bytes::load(bytes, 0);
  const auto four = Bytes::quad(reinterpret_cast<const char*>(bytes), 0);
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
  return double(rounds) * kSums * 2 * 4 * kDynamicPanel / Bytes::kParts;
}

inline DynamicKernels dynamic_kernels_of_vectors() {
  return {Bytes::kTileRows, Bytes::kLineBytes, pack_dynamic, run_dynamic, byte_peak};
}

}  // namespace vlora::quantized::VLORA_ISA

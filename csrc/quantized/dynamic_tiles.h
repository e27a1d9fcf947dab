// Kernels of a tile unit for products of bytes (dynamic.h). Included after dynamic_rows.h and
// tile_product.h.
//
// x is the left factor and W the right one: a block of a panel is a tile as it is stored. After
// each group, the sums go through L1 to vectors, which add them to the totals.
#pragma once

#include "quantized/dynamic_rows.h"
#include "runtime/tile_product.h"

namespace vlora::quantized::VLORA_ISA {

using runtime::kAmxRows;

constexpr int kTile = kAmxRows * kAmxRows;  // sums

// Sums of up to two tiles of rows with up to two panels.
struct alignas(64) DynamicSums {
  int32_t tile[4][kTile];
  float total[2 * kAmxRows][2 * kLanes];
};

// Multiplies two tiles of rows if kLower, which has `lower` rows, else one.
template <bool kLower, int P>
void multiply_dynamic_tiles(const DynamicTile& tile, int upper, int lower) {
  using U = TileRegisters;
  static thread_local DynamicSums sums;
  const int rows = upper + lower;
  const char* left = tile.lines;
  const char* right = reinterpret_cast<const char*>(tile.w);
  const int64_t second = upper * tile.blocks * kBlock;
  for (int row = 0; row < rows; ++row)
    for (int p = 0; p < P; ++p) V::zero().store(sums.total[row] + p * kLanes);
  configure(upper, lower, kAmxRows);
  const auto for_each_sum = [](const auto& body) __attribute__((always_inline)) {
    for_each_index<(kLower ? 2 : 1) * P>([&](auto i) __attribute__((always_inline)) {
      body(At<i.value / P>{}, At<i.value % P>{}, At<i.value / P * 2 + i.value % P>{});
    });
  };
  int64_t blocks = tile.blocks;
  for (int64_t group = 0; group < tile.groups; ++group) {
    for_each_sum([](auto, auto, auto sum)
                     __attribute__((always_inline)) { U::template zero<sum.value>(); });
    for (int i = 0; i < int(kDynamicGroup / kBlock) && blocks > 0; ++i, --blocks) {
      for_each_index<P>([&](auto p) __attribute__((always_inline)) {
        U::template load<6 + p.value>(right + p.value * tile.panel_bytes, kBlock);
      });
      U::template load<4>(left, kBlock);
      if constexpr (kLower)
        U::template load<5>(left + second + (tile.blocks - blocks) * (lower - upper) * kBlock,
                            kBlock);
      for_each_sum([](auto row, auto p, auto sum) __attribute__((always_inline)) {
        U::template multiply_bytes<sum.value, 4 + row.value, 6 + p.value>();
      });
      left += upper * kBlock;
      right += kDynamicPanel * kBlock;
    }
    for_each_sum([&](auto, auto, auto sum) __attribute__((always_inline)) {
      U::template store<sum.value>(sums.tile[sum.value], kAmxRows * 4);
    });
    for (int row = 0; row < rows; ++row) {
      const int half = row >= upper, line = (row - half * upper) * kLanes;
      const float unit = tile.units[row * tile.groups + group];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        float* const at = sums.total[row] + p * kLanes;
        V total = V::load(at);
        add_scaled(total, Bytes::to_floats(Bytes::sums_at(sums.tile[2 * half + p] + line)), unit);
        total.store(at);
      }
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int p = 0; p < P; ++p)
      write_outputs(V::load(sums.total[row] + p * kLanes), tile.scales + p * kDynamicPanel,
                    tile.bias + p * kDynamicPanel,
                    tile.y + row * tile.y_stride + p * kDynamicPanel);
}

inline void run_dynamic_tiles(const Product& p, const DynamicRows& x, int64_t from, int64_t to) {
  for_each_dynamic_tile(
      p, x, from, to, 2, 2, [&](const DynamicTile& tile, int panels, int64_t i) {
        const int64_t begin = dynamic_tile_begin(p, x, i), middle = dynamic_tile_begin(p, x, i + 1),
                      end = dynamic_tile_begin(p, x, std::min(x.tiles, i + 2));
        const auto run = i + 1 < x.tiles ? panels > 1 ? multiply_dynamic_tiles<true, 2>
                                                      : multiply_dynamic_tiles<true, 1>
                         : panels > 1    ? multiply_dynamic_tiles<false, 2>
                                         : multiply_dynamic_tiles<false, 1>;
        run(tile, int(middle - begin), int(end - middle));
      });
}

inline double byte_peak_of_tiles(int64_t rounds) {
  using U = TileRegisters;
  configure(kAmxRows, kAmxRows, kAmxRows);
  for_each_index<8>([](auto tile) { U::template zero<tile.value>(); });
  for (int64_t i = 0; i < rounds; ++i) {
    U::template multiply_bytes<0, 4, 6>();
    U::template multiply_bytes<1, 4, 7>();
    U::template multiply_bytes<2, 5, 6>();
    U::template multiply_bytes<3, 5, 7>();
  }
  return double(rounds) * 4 * kTile * 2 * kBlock;
}

inline DynamicKernels dynamic_kernels_of_tiles() {
  return {kAmxRows, kBlock, pack_dynamic, run_dynamic_tiles, byte_peak_of_tiles};
}

}  // namespace vlora::quantized::VLORA_ISA

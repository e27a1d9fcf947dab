// Products of bytes on a tile unit (dynamic_rows.h). Included after the tile registers of an
// instruction set.
//
// A group of a panel of W and of a tile of rows of x are one product of tiles, whose sums are
// stored, converted and scaled by vectors.
#pragma once

#include <cstring>
#include <utility>

#include "quantized/dynamic.h"
#include "runtime/tile_product.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;
using runtime::kAmxRows;

struct Bytes {
  static constexpr int64_t kLineBytes = kBlock;
  static constexpr bool kAddsOffsets = false;
  static void write_line(const int8_t* integers, char* line) {
    std::memcpy(line, integers, size_t(kBlock));
  }
};

}  // namespace vlora::quantized::VLORA_ISA

#include "quantized/dynamic_rows.h"

namespace vlora::quantized::VLORA_ISA {

constexpr ptrdiff_t kTileLine = 64, kGroupBytes = kDynamicPanel * kDynamicGroup;
static_assert(kDynamicGroup == kBlock && kBlock == kTileLine && kDynamicPanel == kAmxRows);
// Bytes that W is prefetched ahead if x is one tile. Else each panel is prefetched during the one
// before.
constexpr ptrdiff_t kAhead = 4096;

VLORA_INLINE V floats_of(const int32_t* sums) {
  typedef int32_t Integers __attribute__((vector_size(sizeof(R))));
  V floats;
#pragma GCC unroll 4
  for (int i = 0; i < V::kRegisters; ++i)
    floats.r[i].r = __builtin_convertvector(
        *reinterpret_cast<const Integers*>(sums + i * R::kWidth), decltype(R::r));
  return floats;
}

template <int kSum>
VLORA_INLINE void start_group(const char* x, const uint8_t* w) {
  TileRegisters::zero<kSum>();
  TileRegisters::load<4 + kSum>(x, kTileLine);
  TileRegisters::load<6 + kSum>(w, kTileLine);
  TileRegisters::multiply_bytes<kSum, 4 + kSum, 6 + kSum>();
}

// Bytes of W to prefetch, from the group that is multiplied on.
struct Prefetched {
  ptrdiff_t from, to;
};

// Multiplies a panel with T rows of x. Three groups overlap: the product of one starts, the sums of
// the one before are stored, and those of the one before that are scaled.
template <int T>
void multiply_dynamic_tile(const DynamicTile& tile, Prefetched prefetched) {
  alignas(64) int32_t sums[2][kAmxRows * kAmxRows];
  V totals[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) totals[t] = V::zero();
  const char* x = tile.lines;
  const uint8_t* w = tile.w;
  const float* units = tile.units;
  const int64_t groups = tile.groups;
  for (int64_t step = 0; step < groups + 2; ++step) {
    const bool odd = step % 2;
    if (step < groups) {
      for (ptrdiff_t at = prefetched.from; at < prefetched.to; at += kTileLine)
        __builtin_prefetch(w + at, 0, 2);
      odd ? start_group<1>(x, w) : start_group<0>(x, w);
      x += T * kTileLine, w += kGroupBytes;
    }
    if (step > 0 && step <= groups)
      odd ? TileRegisters::store<0>(sums[0], kTileLine)
          : TileRegisters::store<1>(sums[1], kTileLine);
    if (step < 2) continue;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
      add_scaled(totals[t], floats_of(sums[odd] + t * kAmxRows), units[t * groups]);
    ++units;
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
    write_outputs(totals[t], tile.scales, tile.bias, tile.y + t * tile.y_stride, tile.streaming);
}

template <int... T>
VLORA_INLINE auto dynamic_tiles_of(std::integer_sequence<int, T...>) {
  static constexpr void (*kTiles[])(const DynamicTile&,
                                    Prefetched) = {multiply_dynamic_tile<T + 1>...};
  return kTiles;
}

inline void run_dynamic(const Product& p, const DynamicRows& x, int64_t from, int64_t to) {
  const auto multiply = dynamic_tiles_of(std::make_integer_sequence<int, kAmxRows>());
  // The tile with the fewest rows reads one line more than it has.
  const int most = int(ceil_div(p.rows, x.tiles));
  configure(most, most, kAmxRows);
  // Each tile of x prefetches its share of what is multiplied later.
  const ptrdiff_t ahead = x.tiles == 1 ? kAhead : kDynamicPanel * p.w.row_bytes();
  const auto line_of = [&](int64_t row) { return ahead + row * kAmxRows / p.rows * kTileLine; };
  for_each_dynamic_tile(p, x, from, to, [&](const DynamicTile& tile, int64_t rows) {
    const int64_t row = (tile.units - x.units) / x.groups;
    multiply[rows - 1](tile, {line_of(row), line_of(row + rows)});
  });
}

inline double byte_peak(int64_t rounds) {
  configure(kAmxRows, kAmxRows, kAmxRows);
  for (int64_t round = 0; round < rounds; ++round) {
    TileRegisters::multiply_bytes<0, 4, 6>();
    TileRegisters::multiply_bytes<1, 4, 7>();
    TileRegisters::multiply_bytes<2, 5, 6>();
    TileRegisters::multiply_bytes<3, 5, 7>();
  }
  return double(rounds) * 4 * 2 * kAmxRows * double(kGroupBytes);
}

inline DynamicKernels dynamic_kernels_of_tiles() {
  return {kAmxRows, Bytes::kLineBytes, pack_dynamic, run_dynamic, byte_peak};
}

}  // namespace vlora::quantized::VLORA_ISA

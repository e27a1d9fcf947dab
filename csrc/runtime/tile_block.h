// The block of sums that every AMX kernel computes: up to four tiles in registers. Included after
// the tile registers of an instruction set (tile_amx.h or tile_twin.h).
#pragma once

#include <type_traits>
#include <utility>

#include "runtime/tile_unit.h"

namespace vlora::runtime::VLORA_ISA {

// Tile registers are named by compile-time constants.
template <int T>
using At = std::integral_constant<int, T>;

template <class Body, int... I>
VLORA_INLINE void for_each_index(const Body& body, std::integer_sequence<int, I...>) {
  (body(At<I>{}), ...);
}

// Calls body(At<0>{}) … body(At<N - 1>{}).
template <int N, class Body>
VLORA_INLINE void for_each_index(const Body& body) {
  for_each_index(body, std::make_integer_sequence<int, N>{});
}

// Tiles of a factor in memory. Lines of a tile, tiles along the depth, and the two tiles of a step
// are this many bytes apart.
struct TileSource {
  const char* at;
  ptrdiff_t line, depth, second;
};

// Sums of kTall tiles of rows by kWide tiles of columns, at most four, in registers 0 … 3.
// Registers 4 and 5 hold tiles of the left factor, 6 and 7 tiles of the right one.
template <int kTall, int kWide>
struct TileBlock {
  static_assert(kTall <= 2 && kTall * kWide <= 4);
  using U = TileRegisters;

  static VLORA_INLINE void zero() {
    for_each_sum([](auto row, auto column, auto sum)
                     __attribute__((always_inline)) { U::template zero<sum.value>(); });
  }
  // Loads the sums, whose rows are `stride` floats apart. kStreaming: they are not read again soon.
  template <bool kStreaming = false>
  static VLORA_INLINE void load(const float* sums, ptrdiff_t stride) {
    for_each_sum([&](auto row, auto column, auto sum) __attribute__((always_inline)) {
      const float* const at = sums + row.value * kAmxRows * stride + column.value * kLanes;
      if constexpr (kStreaming)
        U::template load_streaming<sum.value>(at, 4 * stride);
      else
        U::template load<sum.value>(at, 4 * stride);
    });
  }
  static VLORA_INLINE void store(float* sums, ptrdiff_t stride) {
    for_each_sum([&](auto row, auto column, auto sum) __attribute__((always_inline)) {
      U::template store<sum.value>(sums + row.value * kAmxRows * stride + column.value * kLanes,
                                   4 * stride);
    });
  }

  static VLORA_INLINE void load_left(const char* at, ptrdiff_t line, ptrdiff_t second) {
    U::template load<4>(at, line);
    if constexpr (kTall > 1) U::template load<5>(at + second, line);
  }
  template <bool kStreaming = false>
  static VLORA_INLINE void load_right(const char* at, ptrdiff_t line, ptrdiff_t second) {
    static_assert(kWide <= 2);
    if constexpr (kStreaming) {
      U::template load_streaming<6>(at, line);
      if constexpr (kWide > 1) U::template load_streaming<7>(at + second, line);
    } else {
      U::template load<6>(at, line);
      if constexpr (kWide > 1) U::template load<7>(at + second, line);
    }
  }

  // Adds the product of one left and one right tile to one sum.
  template <int kRow, int kColumn, int kLeft = 4 + kRow>
  static VLORA_INLINE void multiply() {
    U::template multiply<sum_of_tiles(kRow, kColumn), kLeft, 6 + kColumn % 2>();
  }
  template <int kRow>
  static VLORA_INLINE void multiply_row() {
    static_assert(kWide <= 2);
    multiply<kRow, 0>();
    if constexpr (kWide > 1) multiply<kRow, 1>();
  }
  static VLORA_INLINE void multiply() {
    multiply_row<0>();
    if constexpr (kTall > 1) multiply_row<1>();
  }

  // Adds left times right over `count` tiles of depth, each of which is used once.
  // loaded(At<row>{}) runs after each load of a tile of the left factor, between() after each tile
  // of depth.
  template <bool kStreaming, class Loaded, class Between>
  static VLORA_INLINE void multiply_depth(TileSource left, TileSource right, int64_t count,
                                          const Loaded& loaded, const Between& between) {
    for (; count > 0; --count, left.at += left.depth, right.at += right.depth) {
      load_right<kStreaming>(right.at, right.line, right.second);
      U::template load<4>(left.at, left.line);
      loaded(At<0>{});
      multiply_row<0>();
      if constexpr (kTall > 1) {
        U::template load<5>(left.at + left.second, left.line);
        loaded(At<1>{});
        multiply_row<1>();
      }
      between();
    }
  }

 private:
  // Registers 0 and 1 have the shape of the upper tile of rows, and 2 and 3 that of the lower one.
  static constexpr int sum_of_tiles(int row, int column) {
    return kTall > 1 ? 2 * row + column : column;
  }

  template <class Body>
  static VLORA_INLINE void for_each_sum(const Body& body) {
    for_each_index<kTall * kWide>([&](auto i) __attribute__((always_inline)) {
      constexpr int kRow = i.value / kWide, kColumn = i.value % kWide;
      body(At<kRow>{}, At<kColumn>{}, At<sum_of_tiles(kRow, kColumn)>{});
    });
  }
};

}  // namespace vlora::runtime::VLORA_ISA

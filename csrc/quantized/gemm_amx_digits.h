// Gemm of int8 weights with one scale for each output, multiplied by digits of x (digits_of_rows.h)
// on a tile unit that multiplies bytes. W stays as it is stored.
//
// W is the left factor. The right factor has panels of 16 / kDigits rows of x. It has a column for
// each digit of a row. Included after the digits of an instruction set (digits_amx.h or
// digits_twin.h).
#pragma once

#include <algorithm>

#include "quantized/digits_of_rows.h"
#include "runtime/tile_product.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int64_t kLine = 64, kTileBytes = kAmxRows * kLine;
// Number of panels that are multiplied together. Their sums with two tiles of W fill the registers.
constexpr int kPanelsOfDigits = 2;
static_assert(kBlock == kLine, "a tile of W has the bytes of a block of 16 rows");

// Writes the digits of the rows of panels [from, until).
template <int kDigits>
void pack_digits(const Product& p, const Digits& to, int64_t from, int64_t until) {
  constexpr int64_t kRows = kAmxRows / kDigits;
  const int64_t depth = p.w.blocks();
  for (int64_t panel = from; panel < until; ++panel) {
    const int64_t group = panel / kPanelsOfDigits * kPanelsOfDigits,
                  together = std::min<int64_t>(kPanelsOfDigits, to.panels - group);
    char* const tiles = to.tiles + (group * depth + panel - group) * kTileBytes;
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t t = panel * kRows + row;
      const float* const x = p.x + t * p.x_stride;
      const RowScale row_of_x = t < p.rows ? row_scale<kDigits>(x, p.w.k) : RowScale{};
      if (t < p.rows) to.factors[t] = row_of_x.factor;
      char* out = tiles + row * 4 * kDigits;
      for (int64_t k = 0; k < depth * kBlock; k += kBlock, out += together * kTileBytes)
        write_digits<kDigits>(x + k, int(t < p.rows ? std::min(kBlock, p.w.k - k) : 0),
                              row_of_x.scale, out);
    }
  }
}

// A block of W: up to 16 upper and 16 lower rows.
struct RowsOfBlock {
  const char* w;
  ptrdiff_t row_bytes;
  int64_t upper, lower;

  const char* second() const { return w + kAmxRows * row_bytes; }
};

// Multiplies a block of W with one or two panels, and writes the sums as integers: the panels of
// the upper rows, then those of the lower rows. ahead: bytes from a row of W to the row that is
// prefetched, or 0.
template <bool kLower, int kPanels>
void multiply_digits(RowsOfBlock rows, ptrdiff_t ahead, const char* x, ptrdiff_t depth_bytes,
                     int64_t depth, int32_t* sums) {
  using U = TileRegisters;
  constexpr int kTall = kLower ? 2 : 1;
  const auto for_each_sum = [](const auto& body) __attribute__((always_inline)) {
    for_each_index<kTall * kPanels>([&](auto i) __attribute__((always_inline)) {
      constexpr int kRow = i.value / kPanels, kPanel = i.value % kPanels;
      body(At<kRow>{}, At<kPanel>{}, At<2 * kRow + kPanel>{});
    });
  };
  for_each_sum([](auto, auto, auto sum)
                   __attribute__((always_inline)) { U::template zero<sum.value>(); });
  for (; depth > 0; --depth, rows.w += kBlock, x += depth_bytes) {
    U::template load<4>(rows.w, rows.row_bytes);
    if constexpr (kLower) U::template load<5>(rows.second(), rows.row_bytes);
    if (ahead)
      for (int64_t row = 0; row < rows.upper + rows.lower; ++row)
        __builtin_prefetch(rows.w + ahead + row * rows.row_bytes, 0, 2);
    for_each_index<kPanels>([&](auto panel) __attribute__((always_inline)) {
      U::template load<6 + panel.value>(x + panel.value * kTileBytes, kLine);
    });
    for_each_sum([](auto row, auto panel, auto sum) __attribute__((always_inline)) {
      U::template multiply_bytes<sum.value, 4 + row.value, 6 + panel.value>();
    });
  }
  for_each_sum([&](auto, auto, auto sum) __attribute__((always_inline)) {
    U::template store<sum.value>(sums + sum.value * kAmxRows * kAmxRows, kLine);
  });
}

// Multiplies blocks [from, to) of W with all rows of x.
template <int kDigits>
void gemm_digits(const Product& p, const Digits& x, int64_t from, int64_t to) {
  constexpr int64_t kRows = kAmxRows / kDigits;
  alignas(64) int32_t sums[4 * kAmxRows * kAmxRows];
  const int64_t depth = p.w.blocks(), row_bytes = p.w.row_bytes();
  for (int64_t n = from * kDigitBlock; n < std::min(p.w.n, to * kDigitBlock); n += kDigitBlock) {
    const int64_t upper = std::min<int64_t>(kAmxRows, p.w.n - n),
                  lower = std::min<int64_t>(kAmxRows, p.w.n - n - upper);
    const RowsOfBlock rows{reinterpret_cast<const char*>(p.w.values) + n * row_bytes, row_bytes,
                           upper, lower};
    configure(int(upper), int(lower), kAmxRows);
    for (int64_t panel = 0; panel < x.panels; panel += kPanelsOfDigits) {
      const ptrdiff_t ahead = panel == 0 ? kDigitBlock * row_bytes : 0;
      const int64_t together = std::min<int64_t>(kPanelsOfDigits, x.panels - panel);
      const auto multiply = lower > 0
                                ? together > 1 ? multiply_digits<true, 2> : multiply_digits<true, 1>
                            : together > 1 ? multiply_digits<false, 2>
                                           : multiply_digits<false, 1>;
      multiply(rows, ahead, x.tiles + panel * depth * kTileBytes, together * kTileBytes, depth,
               sums);
      const int64_t first_row = panel * kRows, end = std::min(p.rows, first_row + together * kRows);
      for (int64_t t = first_row; t < end; ++t)
        for (int half = 0; half < (lower > 0 ? 2 : 1); ++half) {
          const int64_t row = t - first_row, first = n + half * kAmxRows;
          const int32_t* const tile = sums + (2 * half + row / kRows) * kAmxRows * kAmxRows;
          store_digit_sums<kDigits>(
              tile, int(row % kRows), int(half ? lower : upper), p.w.scales + first, x.factors[t],
              p.bias ? p.bias + first : nullptr, p.y + t * p.y_stride + first);
        }
    }
  }
}

template <int kDigits>
DigitGemm digit_gemm_of() {
  return {kDigits, pack_digits<kDigits>, gemm_digits<kDigits>};
}

}  // namespace vlora::quantized::VLORA_ISA

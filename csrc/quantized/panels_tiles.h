// Products with int4 weights in panels of 16 rows on a tile unit, and the packing of x for them.
#pragma once

#include <algorithm>

#include "quantized/panels_integers.h"
#include "quantized/panels_rounded.h"

namespace vlora::quantized::VLORA_ISA {

// kRows: the numbers of rows of x in a tile for which there are kernels.
template <int... kRows>
void run_panels(const Product& p, const PanelSlice& slice, const char* x, int64_t from, int64_t to,
                char* scratch) {
  if (from >= to) return;
  if (slice.rounded) return run_rounded(p, slice, x, from, to, scratch);
  ((slice.tile_rows == kRows ? multiply_rows<kRows>(p, slice, x, from, to, scratch) : void()), ...);
}

// Writes the zero terms of a packed tile of rows, for each step: minus the sum of the row's values
// in units of kZeroStep. The sums are products with ones, so they are exact if the products are.
inline void write_zero_terms(const Weight& w, const PanelSlice& slice, const char* x,
                             float* terms) {
  const int tiles = tiles_in_step(w), rows = slice.tile_rows;
  alignas(64) uint16_t ones[kTile / 2];
  alignas(64) float sums[kTile / 4];
  std::fill(ones, ones + kTile / 2, uint16_t(0x3f80));
  configure(rows, rows, kAmxRows);
  U::load<6>(ones, kTileLine);
  for (int64_t step = 0; step < slice.count / tiles; ++step) {
    U::zero<0>();
    const int count = tiles * slice.limbs();
    for (int i = count - 1; i >= 0; --i) {
      U::load<4>(x + i * rows * kTileLine, kTileLine);
      U::multiply<0, 4, 6>();
    }
    x += count * rows * kTileLine;
    U::store<0>(sums, kTileLine);
    for (int r = 0; r < rows; ++r) *terms++ = -kZeroStep * sums[r * kAmxRows];
  }
}

// Packs tiles [from, until) of rows of x.
inline void pack_rows(const Product& p, const PanelSlice& slice, char* to, int64_t from,
                      int64_t until) {
  for (int64_t tile = from; tile < until; ++tile) {
    char* const first = to + tile * slice.tile_bytes();
    char* out = first;
    const int64_t row = tile * slice.tile_rows;
    for (int64_t i = 0; i < slice.count; ++i, out += slice.limbs() * slice.tile_rows * kTileLine) {
      const int64_t k = (slice.from + i) * kMinGroup;
      const int count = int(std::min(kMinGroup, p.w.k - k));
      for (int r = 0; r < slice.tile_rows; ++r) {
        const float* const values = p.x + (slice.row + row + r) * p.x_stride + k;
        const bool exists = row + r < slice.rows && count > 0;
        const Fp32Line line = exists ? Fp32Line::load_some(values, count) : Fp32Line::zero();
        if (slice.limbs() == kLimbs) {
          store_limbs(split_truncated(line), out + r * kTileLine, slice.tile_rows * kTileLine);
        } else {
          line.rounded().store(out + r * kTileLine);
        }
      }
    }
    if (p.w.zeros && !slice.rounded)
      write_zero_terms(p.w, slice, first, reinterpret_cast<float*>(first + slice.value_bytes()));
  }
}

template <int... kRows>
TilePanels tile_panels_of() {
  return {pack_rows, run_panels<kRows...>, {kRows...}};
}

}  // namespace vlora::quantized::VLORA_ISA

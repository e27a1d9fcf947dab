// The loop that covers a product with register tiles.
#pragma once

#include <algorithm>

#include "atmm/kernels.h"
#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "variants.h"

namespace vlora::atmm {

// Bytes of panels, a quarter of L2, that several register tiles of rows read one after another.
inline int64_t panel_bytes() {
  static const int64_t bytes = runtime::machine().l2 / 4;
  return bytes;
}

// Assumed latency of memory, in seconds.
constexpr double kLatency = 100e-9;

// Bytes of panels to prefetch ahead: the amount that one core reads during the latency of memory.
inline ptrdiff_t prefetch_bytes() {
  static const ptrdiff_t bytes = ptrdiff_t(runtime::machine().memory * kLatency) / 64 * 64;
  return bytes;
}

// A packed matrix.
struct Panels {
  const char* data;
  int64_t count;  // of panels
  int64_t steps;  // of the whole depth
  int bundle;     // panels interleaved
  bool narrow;    // whether the last panel is narrow; it is then a bundle of its own

  int64_t wide() const { return count - narrow; }  // panels that are not narrow
  int64_t bundles() const { return ceil_div(wide(), bundle) + narrow; }
  // Returns the address of a step of panel i, and the bytes between its steps.
  const char* address(int64_t i, int64_t step, ptrdiff_t* step_bytes) const {
    const int64_t begin = i / bundle * bundle, width = std::min<int64_t>(bundle, wide() - begin);
    *step_bytes = width * 64;
    return data + (begin * steps + width * step + i - begin) * 64;
  }
  // Returns the first panel of a bundle, or `count` after the last one.
  int64_t first_of(int64_t index) const {
    return index < bundles() ? std::min(wide(), index * bundle) : count;
  }
};

// A part of a product: some rows, panels [first, last) and steps [step, step + steps) of the depth.
// `step` is even.
struct TileLoop {
  const TileKernel (*kernels)[kMaxTileRows];
  // Kernels with software prefetch for the first of several register tiles of rows, which loads the
  // panels into L2. If null, `kernels` computes that tile, too.
  const TileKernel (*first_kernels)[kMaxTileRows];
  const int* kernel_rows;  // Kernels::max_rows
  int max_rows;            // upper bound of a register tile's rows
  int columns;             // maximum number of panels in a register tile
  int64_t rows, first, last, step, steps;
  ptrdiff_t x_row, out_row, in_row;  // bytes between rows
  ptrdiff_t out_panel, in_panel;     // bytes between panels
  int32_t tail;                      // valid columns in the matrix's last panel
  // Kernels for fp32 panels, or null. If set, `widen` converts bf16 panels once for all the
  // register tiles of rows that read them.
  const TileKernel (*fp32_kernels)[kMaxTileRows];
  void (*widen)(const Tile&, int columns, float* to);
  bool fetch_rows;  // whether rows are in memory, so that those of the next tile are prefetched
};

// Runs the register tiles. `t` holds what they have in common. Its rows and results are those of
// the part's first row and panel.
inline void run_tiles(const TileLoop& loop, const Panels& p, Tile t) {
  const char* const x = static_cast<const char*>(t.x);
  char* const out = static_cast<char*>(t.out);
  const char* const in = static_cast<const char*>(t.in);
  for (int64_t panel = loop.first; panel < loop.last;) {
    const bool narrow = panel == p.wide();
    const int64_t begin = panel / p.bundle * p.bundle;
    const int64_t width = narrow ? 1 : std::min<int64_t>(p.bundle, p.wide() - begin);
    const int64_t remaining = narrow ? 1 : std::min(begin + width, loop.last) - panel;
    const int columns = int(ceil_div(remaining, ceil_div(remaining, std::max(1, loop.columns))));
    const int64_t tiles =
        ceil_div(loop.rows, std::min(loop.kernel_rows[columns - 1], loop.max_rows));
    t.steps = loop.steps;
    t.step_bytes = width * 64;
    t.group_bytes = width * p.steps * 64;
    t.group_columns = int32_t(width) * kPanel;
    t.groups = 1;
    if (columns == p.bundle && !narrow)
      t.groups = (std::min(loop.last, p.wide()) - panel) / columns;
    // Several register tiles of rows read the same panels, so take only panels that stay in L2.
    if (tiles > 1)
      t.groups = std::clamp<int64_t>(panel_bytes() / (columns * loop.steps * 64), 1, t.groups);
    const int index = narrow ? kNarrowIndex : columns - 1;
    const TileKernel* kernels = loop.kernels[index];
    t.panels = p.data + (narrow ? panel * p.steps + loop.step / 2
                                : begin * p.steps + width * loop.step + panel - begin) *
                            64;
    const int64_t end = panel + t.groups * columns, offset = panel - loop.first;
    t.tail = end == p.count ? loop.tail : kPanel;
    const bool widen = tiles > 1 && loop.fp32_kernels && !narrow;
    if (widen) {
      thread_local runtime::Scratch scratch;
      float* panels = scratch.get(t.groups * columns * loop.steps * 2 * kPanel);
      loop.widen(t, columns, panels);
      kernels = loop.fp32_kernels[columns - 1];
      t.panels = reinterpret_cast<const char*>(panels);
      t.steps = 2 * loop.steps;
      t.step_bytes = columns * 64;
      t.group_bytes = t.steps * t.step_bytes;
    }
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = loop.rows * i / tiles, count = loop.rows * (i + 1) / tiles - row;
      t.x = x + row * loop.x_row;
      t.out = out + row * loop.out_row + offset * loop.out_panel;
      t.in = in + row * loop.in_row + offset * loop.in_panel;
      if (loop.fetch_rows && row + 2 * count <= loop.rows)
        for (int64_t at = 0; at < count * loop.x_row; at += 64)
          __builtin_prefetch(static_cast<const char*>(t.x) + count * loop.x_row + at, 0, 3);
      if (i == 0 && tiles > 1 && loop.first_kernels && !widen && count <= kMaxDirectRows) {
        t.prefetch = prefetch_bytes();
        loop.first_kernels[index][count - 1](t);
        t.prefetch = 0;
      } else {
        kernels[count - 1](t);
      }
    }
    panel = end;
  }
}

}  // namespace vlora::atmm

// How a product is covered with register tiles.
#pragma once

#include <algorithm>

#include "atmm/kernels.h"
#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "path.h"

namespace vlora::atmm {

// Of panels that several row tiles read in turn: a quarter of L2.
inline int64_t panel_bytes() {
  static const int64_t bytes = runtime::machine().l2 / 4;
  return bytes;
}
constexpr double kLatency = 100e-9;
// Of memory, in seconds.

// Bytes of panels on their way while others are multiplied.
inline ptrdiff_t ahead() {
  static const ptrdiff_t bytes = ptrdiff_t(runtime::machine().memory * kLatency) / 64 * 64;
  return bytes;
}

// A packed matrix.
struct Panels {
  const char* at;
  int64_t count;  // of panels
  int64_t steps;  // of its whole depth
  int bundle;
  bool narrow;  // the last panel is narrow, a bundle of its own

  int64_t wide() const { return count - narrow; }
  int64_t bundles() const { return ceil_div(wide(), bundle) + narrow; }
  // Where a panel's depth begins, and the bytes from step to step.
  const char* panel(int64_t i, int64_t step, ptrdiff_t* step_bytes) const {
    const int64_t begin = i / bundle * bundle, width = std::min<int64_t>(bundle, wide() - begin);
    *step_bytes = width * 64;
    return at + (begin * steps + width * step + i - begin) * 64;
  }
  int64_t first_of(int64_t of_bundle) const {
    return of_bundle < bundles() ? std::min(wide(), of_bundle * bundle) : count;
  }
};

// A part of a product: some rows, panels [first, last), depth steps [step, step + steps), `step` an
// even number.
struct Walk {
  const TileKernel (*kernels)[kMaxRows];
  // For the first of several row tiles, which brings the panels to L2: null, or some that fetch ahead.
  const TileKernel (*bringing)[kMaxRows];
  const int* max_rows;
  int most_rows;
  int columns;  // panels in registers, at most
  int64_t rows, first, last, step, steps;
  ptrdiff_t x_row, out_row, in_row;  // bytes from row to row
  ptrdiff_t out_panel, in_panel;     // bytes from panel to panel
  int32_t tail;                      // valid columns in the matrix's last panel
  // Of fp32 panels. Where set, panels that several row tiles read are made fp32 once, not by each.
  const TileKernel (*widened)[kMaxRows];
  void (*widen)(const Tile&, int columns, float* to);
  bool fetch_rows;                   // rows come from memory: the next tile's are fetched ahead
};

// Calls the register tiles. `t` holds what they have in common: rows and results at the part's
// first row and panel.
inline void walk(const Walk& w, const Panels& p, Tile t) {
  const char* const x = static_cast<const char*>(t.x);
  char* const out = static_cast<char*>(t.out);
  const char* const in = static_cast<const char*>(t.in);
  for (int64_t panel = w.first; panel < w.last;) {
    const bool narrow = panel == p.wide();
    const int64_t begin = panel / p.bundle * p.bundle;
    const int64_t width = narrow ? 1 : std::min<int64_t>(p.bundle, p.wide() - begin);
    const int64_t here = narrow ? 1 : std::min(begin + width, w.last) - panel;
    const int columns = int(ceil_div(here, ceil_div(here, std::max(1, w.columns))));
    const int64_t tiles = ceil_div(w.rows, std::min(w.max_rows[columns - 1], w.most_rows));
    t.steps = w.steps;
    t.step_bytes = width * 64;
    t.group_bytes = width * p.steps * 64;
    t.group_columns = int32_t(width) * kPanel;
    t.groups = 1;
    if (columns == p.bundle && !narrow) t.groups = (std::min(w.last, p.wide()) - panel) / columns;
    // Several row tiles read the same panels: as many of them as stay in L2 meanwhile.
    if (tiles > 1)
      t.groups = std::clamp<int64_t>(panel_bytes() / (columns * w.steps * 64), 1, t.groups);
    const TileKernel* kernels = w.kernels[narrow ? kNarrow : columns - 1];
    t.panels = p.at + (narrow ? panel * p.steps + w.step / 2
                              : begin * p.steps + width * w.step + panel - begin) *
                          64;
    const int64_t end = panel + t.groups * columns, offset = panel - w.first;
    t.tail = end == p.count ? w.tail : kPanel;
    const bool widen = tiles > 1 && w.widened && !narrow;
    if (widen) {
      thread_local runtime::Scratch scratch;
      float* panels = scratch.get(t.groups * columns * w.steps * 2 * kPanel);
      w.widen(t, columns, panels);
      kernels = w.widened[columns - 1];
      t.panels = reinterpret_cast<const char*>(panels);
      t.steps = 2 * w.steps;
      t.step_bytes = columns * 64;
      t.group_bytes = t.steps * t.step_bytes;
    }
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = w.rows * i / tiles, count = w.rows * (i + 1) / tiles - row;
      t.x = x + row * w.x_row;
      t.out = out + row * w.out_row + offset * w.out_panel;
      t.in = in + row * w.in_row + offset * w.in_panel;
      if (w.fetch_rows && row + 2 * count <= w.rows)
        for (int64_t at = 0; at < count * w.x_row; at += 64)
          __builtin_prefetch(static_cast<const char*>(t.x) + count * w.x_row + at, 0, 3);
      if (i == 0 && tiles > 1 && w.bringing && !widen && count <= kFewRows) {
        t.prefetch = ahead();
        w.bringing[narrow ? kNarrow : columns - 1][count - 1](t);
        t.prefetch = 0;
      } else {
        kernels[count - 1](t);
      }
    }
    panel = end;
  }
}

}  // namespace vlora::atmm

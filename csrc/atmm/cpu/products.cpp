#include "products.h"

#include <algorithm>

namespace vlora::atmm {

float* row_scratch(int64_t floats) {
  thread_local runtime::Scratch scratch;
  return scratch.get(floats);
}

namespace {

// Panels [first, last), none of them narrow, by the unit that multiplies tiles: `use` gets each product
// that covers them, without its left side and its sums, the first row, how many, and the first panel.
template <class Use>
void over_tiles(const Panels& panels, int64_t first, int64_t last, int64_t step, int64_t rows,
                const Use& use) {
  for (int64_t panel = first; panel < last;) {
    runtime::TileProduct t{};
    t.right = panels.panel(panel, step, &t.step_bytes);
    t.panels = 1;
    if (panel + 1 < last) {
      ptrdiff_t step_bytes;
      t.panel_bytes = panels.panel(panel + 1, step, &step_bytes) - static_cast<const char*>(t.right);
      if (step_bytes == t.step_bytes) t.panels = 2;
    }
    for (int64_t row = 0; row < rows; row += runtime::kTileRows) {
      t.rows = int(std::min<int64_t>(runtime::kTileRows, rows - row));
      use(t, row, panel);
    }
    panel += t.panels;
  }
}

constexpr int64_t kFetchedSteps = 2 * runtime::kTile;
// Of a bundle, that are fetched while as many before them are multiplied: loads of tiles alone keep too few
// lines of memory on their way.

// Few rows pass an adapter once, out of memory; more rows pass it again, out of L2.
bool passes_once(int64_t rows) { return rows <= runtime::kTile; }

void fetch(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// Panels [first, last) of x A^T, none of them narrow. What is fetched last of a bundle is what lies behind
// it: the next one, or B.
void shrink_by_tiles(const Call& c, const Panels& panels, int64_t rows, const Rows& x, float* to,
                     int64_t first, int64_t last) {
  const int64_t begin = c.steps(x.k), all = c.steps(x.count);
  const int64_t most = passes_once(rows) ? kFetchedSteps : all;
  for (int64_t bundle = first; bundle < last;) {
    const int64_t end = std::min(last, (bundle / panels.bundle + 1) * panels.bundle);
    for (int64_t step = 0; step < all; step += most) {
      const int64_t steps = std::min(most, all - step);
      if (passes_once(rows)) {
        ptrdiff_t step_bytes;
        const char* const next = panels.panel(bundle, begin + step + steps, &step_bytes);
        fetch(next, kFetchedSteps * step_bytes);
      }
      over_tiles(panels, bundle, end, begin + step, rows, [&](runtime::TileProduct t, int64_t row, int64_t panel) {
        t.left = x.at + row * x.stride + step;
        t.left_bytes = x.stride * 4;
        t.steps = steps;
        t.out = to + row * kRowStride + (panel - first) * kPanel;
        t.out_stride = kRowStride;
        t.first = x.first && step == 0;
        c.kernels.tiles->multiply(t);
      });
    }
    bundle = end;
  }
}

// The narrow panel. Its steps are put one after another, 8 columns each: a tile of 16 columns that begins at
// a step has the next one's in its right half, and what these sum up to falls into columns that nobody reads.
void narrow_by_tiles(const Call& c, const Panels& panels, int64_t rows, const Rows& x, float* to) {
  constexpr int64_t kStepFloats = kPanel / 2;
  thread_local runtime::Scratch scratch;
  const int64_t step = c.steps(x.k), steps = c.steps(x.count), lines = ceil_div(steps, 2);
  float* const ordered = scratch.get(lines * kPanel + kStepFloats);
  c.kernels.split_narrow(panels.at + (panels.wide() * panels.steps + step / 2) * 64, lines, ordered);
  std::fill_n(ordered + lines * kPanel, kStepFloats, 0.0f);
  runtime::TileProduct t{};
  t.left_bytes = x.stride * 4;
  t.right = ordered;
  t.step_bytes = kStepFloats * 4;
  t.panels = 1;
  t.steps = steps;
  t.out_stride = kRowStride;
  t.first = x.first;
  for (int64_t row = 0; row < rows; row += runtime::kTileRows) {
    t.left = x.at + row * x.stride;
    t.rows = int(std::min<int64_t>(runtime::kTileRows, rows - row));
    t.out = to + row * kRowStride;
    c.kernels.tiles->multiply(t);
  }
}

}  // namespace

void shrink_block(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows,
                  const Rows& x, float* to, int64_t first, int64_t last) {
  const TileSet& set = c.kernels.shrink[int(c.p.dtype)];
  const Panels panels = c.a(pair);
  const Path path = c.paths(config, pair, rows).shrink;
  if (path == Path::kTiles) {
    const int64_t end = std::min(last, panels.wide());
    shrink_by_tiles(c, panels, rows, x, to, first, end);
    if (end < last) narrow_by_tiles(c, panels, rows, x, to + (std::max(first, end) - first) * kPanel);
    return;
  }
  Tile t{};
  t.x = x.at;
  t.x_stride = x.stride;
  t.out = to;
  t.first = x.first;
  t.last = x.last;
  t.prefetch = config.prefetch * 64;
  Walk w{};
  const bool in_pieces = x.in == RowsIn::kPieces;
  w.kernels = in_pieces ? set.packed : path == Path::kStream ? set.stream : set.direct;
  w.max_rows = c.kernels.max_rows;
  if (!in_pieces && !c.one_order && rows > kFewRows) w.bringing = set.stream;
  if (path == Path::kWidened) {
    w.widened = c.kernels.shrink[int(Dtype::kFp32)].packed;
    w.widen = c.kernels.widen_panels;
  }
  w.most_rows = in_pieces ? kMaxRows : int(kFewRows);
  w.columns = std::min(config.shrink_columns / kPanel, c.kernels.bundle);
  w.rows = rows;
  w.first = first;
  w.last = last;
  w.step = c.steps(x.k);
  w.steps = c.steps(x.count);
  w.x_row = x.stride * 4;
  w.out_row = kRowStride * 4;
  w.out_panel = kPanel * 4;
  w.tail = kPanel;
  walk(w, panels, t);
}

void shrink(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows, const Rows& x,
            float* low) {
  constexpr int64_t kBlockPanels = kRankBlock / kPanel;
  const int64_t panels = c.a(pair).count;
  for (int64_t first = 0; first < panels; first += kBlockPanels, low += rows * kRowStride)
    shrink_block(c, config, pair, rows, x, low, first, std::min(panels, first + kBlockPanels));
}

void finish_low(const Call& c, const Pair& pair, int64_t rows, float* low) {
  if (c.p.dtype != Dtype::kBf16) return;
  for (int64_t block = 0; block < rank_blocks(pair); ++block)
    c.kernels.round_rows(low + block * rows * kRowStride, rows,
                         std::min<int64_t>(kRankBlock, pair.rank - block * kRankBlock));
}

void expand(const Call& c, const TileConfig& config, const Segment& s, int output, int64_t row,
            int64_t rows, const float* low, int64_t first, int64_t last) {
  const Pair& pair = c.pair(s, output);
  const Output& out = c.p.output[output];
  const Panels panels = c.b(pair, output);
  const ptrdiff_t size = ptrdiff_t(size_of(c.p.rows_dtype));
  const int32_t tail = int32_t(out.d_out - (panels.count - 1) * kPanel);
  const Path path = c.paths(config, pair, rows).expand;
  if (path == Path::kTiles) {
    alignas(64) float sums[runtime::kTileRows][runtime::kTilePanels * kPanel];
    char* const y = static_cast<char*>(c.p.y) + (row * c.p.y_stride + out.column) * size;
    over_tiles(panels, first, last, 0, rows, [&](runtime::TileProduct t, int64_t from, int64_t panel) {
      t.left_bytes = kRowStride * 4;
      t.out = &sums[0][0];
      t.out_stride = runtime::kTilePanels * kPanel;
      const char* const right = static_cast<const char*>(t.right);
      const int64_t bundle_bytes = panels.steps * t.step_bytes;
      if (passes_once(rows) && panel % panels.bundle == 0) fetch(right + bundle_bytes, bundle_bytes);
      for (int64_t block = 0; block < rank_blocks(pair); ++block) {
        const int64_t rank = block * kRankBlock;
        t.left = low + (block * rows + from) * kRowStride;
        t.right = right + c.steps(rank) * t.step_bytes;
        t.steps = c.steps(std::min<int64_t>(kRankBlock, pair.rank - rank));
        t.first = block == 0;
        c.kernels.tiles->multiply(t);
      }
      const int64_t cut = panel + t.panels == panels.count ? kPanel - tail : 0;
      c.kernels.add_sums(c.p.rows_dtype, y + (from * c.p.y_stride + panel * kPanel) * size,
                         c.p.y_stride, t.out, t.out_stride, t.rows, t.panels * kPanel - cut,
                         float(s.sign));
    });
    return;
  }
  const TileSet& set = c.kernels.expand[int(c.p.dtype)][int(c.p.rows_dtype)];
  const bool few = path == Path::kStream;
  Tile t{};
  t.x_stride = kRowStride;
  t.out = static_cast<char*>(c.p.y) + (row * c.p.y_stride + out.column + first * kPanel) * size;
  t.in = t.out;
  t.out_stride = t.in_stride = c.p.y_stride;
  t.sign = float(s.sign);
  t.prefetch = config.prefetch * 64;
  Walk w{};
  w.kernels = few ? set.stream : set.packed;
  if (!c.one_order && !few) w.bringing = set.stream;
  w.max_rows = c.kernels.max_rows;
  w.most_rows = few ? int(kFewRows) : kMaxRows;
  if (path == Path::kWidened) {
    w.widen = c.kernels.widen_panels;
    if (c.p.rows_dtype == Dtype::kFp32) {
      w.widened = c.kernels.expand[int(Dtype::kFp32)][int(Dtype::kFp32)].packed;
    } else {
      // The merge's tiles add fp32 products to bf16 rows; they have no more than kFewRows.
      w.widened = c.kernels.merge[int(Dtype::kBf16)];
      w.most_rows = int(kFewRows);
    }
  }
  w.columns = std::min(config.expand_columns / kPanel, c.kernels.bundle);
  w.rows = rows;
  w.first = first;
  w.last = last;
  w.x_row = kRowStride * 4;
  w.out_row = w.in_row = c.p.y_stride * size;
  w.out_panel = w.in_panel = kPanel * size;
  w.tail = tail;
  for (int64_t block = 0; block < rank_blocks(pair); ++block) {
    const int64_t rank = block * kRankBlock;
    t.x = low + block * rows * kRowStride;
    w.step = c.steps(rank);
    w.steps = c.steps(std::min<int64_t>(kRankBlock, pair.rank - rank));
    walk(w, panels, t);
  }
}

}  // namespace vlora::atmm

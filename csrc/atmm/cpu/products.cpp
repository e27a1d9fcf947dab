#include "products.h"

#include <algorithm>

namespace vlora::atmm {

float* row_scratch(int64_t floats) {
  thread_local runtime::Scratch scratch;
  return scratch.get(floats);
}

namespace {

// Covers panels [first, last), none of them narrow, with products of the tile unit. Calls `use`
// with each product, its first row and its first panel; `use` sets the left operand and the sums.
template <class Use>
void over_tiles(const Panels& panels, int64_t first, int64_t last, int64_t step, int64_t rows,
                const Use& use) {
  for (int64_t panel = first; panel < last;) {
    runtime::TileProduct t{};
    t.right = panels.address(panel, step, &t.step_bytes);
    t.panels = 1;
    if (panel + 1 < last) {
      ptrdiff_t step_bytes;
      t.panel_bytes =
          panels.address(panel + 1, step, &step_bytes) - static_cast<const char*>(t.right);
      if (step_bytes == t.step_bytes) t.panels = 2;
    }
    for (int64_t row = 0; row < rows; row += runtime::kAmxBlockRows) {
      t.rows = int(std::min<int64_t>(runtime::kAmxBlockRows, rows - row));
      use(t, row, panel);
    }
    panel += t.panels;
  }
}

// Number of steps of a bundle that are prefetched while as many steps before them are multiplied.
// The loads of the tiles alone would keep too few cache lines in flight.
constexpr int64_t kFetchedSteps = 2 * runtime::kAmxRows;

// Whether an adapter is read only once, from memory. With more rows it is read again, from L2.
bool reads_once(int64_t rows) { return rows <= runtime::kAmxRows; }

void prefetch(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// Computes panels [first, last) of x A^T, none of them narrow. While it computes the end of a
// bundle, it prefetches what follows in memory: the next bundle, or B.
void shrink_by_tiles(const Call& c, const Panels& panels, int64_t rows, const Rows& x, float* to,
                     int64_t first, int64_t last) {
  const int64_t begin = c.steps(x.k), total_steps = c.steps(x.count);
  const int64_t max_steps = reads_once(rows) ? kFetchedSteps : total_steps;
  for (int64_t bundle = first; bundle < last;) {
    const int64_t end = std::min(last, (bundle / panels.bundle + 1) * panels.bundle);
    for (int64_t step = 0; step < total_steps; step += max_steps) {
      const int64_t steps = std::min(max_steps, total_steps - step);
      if (reads_once(rows)) {
        ptrdiff_t step_bytes;
        const char* const next = panels.address(bundle, begin + step + steps, &step_bytes);
        prefetch(next, kFetchedSteps * step_bytes);
      }
      over_tiles(panels, bundle, end, begin + step, rows,
                 [&](runtime::TileProduct t, int64_t row, int64_t panel) {
                   t.left = x.data + row * x.stride + step;
                   t.left_bytes = x.stride * 4;
                   t.steps = steps;
                   t.out = to + row * kScratchStride + (panel - first) * kPanel;
                   t.out_stride = kScratchStride;
                   t.first = x.first_part && step == 0;
                   c.kernels.tiles->multiply(t);
                 });
    }
    bundle = end;
  }
}

// Computes the narrow panel. Its steps follow one another, 8 columns each. A tile of 16 columns
// that begins at a step has the next step in its right half. The sums of that half go to columns
// that are not read.
void narrow_by_tiles(const Call& c, const Panels& panels, int64_t rows, const Rows& x, float* to) {
  constexpr int64_t kStepFloats = kPanel / 2;
  thread_local runtime::Scratch scratch;
  const int64_t step = c.steps(x.k), steps = c.steps(x.count), lines = ceil_div(steps, 2);
  float* const ordered = scratch.get(lines * kPanel + kStepFloats);
  c.kernels.deinterleave_narrow(panels.data + (panels.wide() * panels.steps + step / 2) * 64, lines,
                                ordered);
  std::fill_n(ordered + lines * kPanel, kStepFloats, 0.0f);
  runtime::TileProduct t{};
  t.left_bytes = x.stride * 4;
  t.right = ordered;
  t.step_bytes = kStepFloats * 4;
  t.panels = 1;
  t.steps = steps;
  t.out_stride = kScratchStride;
  t.first = x.first_part;
  for (int64_t row = 0; row < rows; row += runtime::kAmxBlockRows) {
    t.left = x.data + row * x.stride;
    t.rows = int(std::min<int64_t>(runtime::kAmxBlockRows, rows - row));
    t.out = to + row * kScratchStride;
    c.kernels.tiles->multiply(t);
  }
}

// Computes panels [first, last) of y += sign * low B^T.
void expand_by_tiles(const Call& c, const Segment& s, int output, int64_t row, int64_t rows,
                     const float* low, int64_t first, int64_t last) {
  const Pair& pair = c.pair(s, output);
  const Output& out = c.p.output[output];
  const Panels panels = c.b(pair, output);
  const ptrdiff_t size = ptrdiff_t(size_of(c.p.rows_dtype));
  alignas(64) float sums[runtime::kAmxBlockRows][runtime::kAmxBlockPanels * kPanel];
  char* const y = static_cast<char*>(c.p.y) + (row * c.p.y_stride + out.column) * size;
  over_tiles(
      panels, first, last, 0, rows, [&](runtime::TileProduct t, int64_t from, int64_t panel) {
        t.left_bytes = kScratchStride * 4;
        t.out = &sums[0][0];
        t.out_stride = runtime::kAmxBlockPanels * kPanel;
        const char* const right = static_cast<const char*>(t.right);
        const int64_t bundle_bytes = panels.steps * t.step_bytes;
        if (reads_once(rows) && panel % panels.bundle == 0)
          prefetch(right + bundle_bytes, bundle_bytes);
        for (int64_t block = 0; block < rank_blocks(pair); ++block) {
          const int64_t rank = block * kRankBlock;
          t.left = low + (block * rows + from) * kScratchStride;
          t.right = right + c.steps(rank) * t.step_bytes;
          t.steps = c.steps(std::min<int64_t>(kRankBlock, pair.rank - rank));
          t.first = block == 0;
          c.kernels.tiles->multiply(t);
        }
        const int64_t columns = std::min<int64_t>(t.panels * kPanel, out.d_out - panel * kPanel);
        c.kernels.add_sums(c.p.rows_dtype, y + (from * c.p.y_stride + panel * kPanel) * size,
                           c.p.y_stride, t.out, t.out_stride, t.rows, columns, float(s.sign));
      });
}

}  // namespace

void shrink_block(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows,
                  const Rows& x, float* to, int64_t first, int64_t last) {
  const TileSet& set = c.kernels.shrink[int(c.p.dtype)];
  const Panels panels = c.a(pair);
  const Variant variant = c.variants(pair, rows).shrink;
  if (variant == Variant::kTileUnit) {
    const int64_t end = std::min(last, panels.wide());
    shrink_by_tiles(c, panels, rows, x, to, first, end);
    if (end < last)
      narrow_by_tiles(c, panels, rows, x, to + (std::max(first, end) - first) * kPanel);
    return;
  }
  Tile t{};
  t.x = x.data;
  t.x_stride = x.stride;
  t.out = to;
  t.first_part = x.first_part;
  t.last_part = x.last_part;
  t.prefetch = config.prefetch * 64;
  TileLoop loop{};
  const bool in_pieces = x.source == RowSource::kCopiedByPieces;
  loop.kernels = in_pieces                          ? set.packed
                 : variant == Variant::kPrefetching ? set.prefetching
                                                    : set.direct;
  loop.kernel_rows = c.kernels.max_rows;
  if (!in_pieces && !c.fixed_order && rows > kMaxDirectRows) loop.first_kernels = set.prefetching;
  if (variant == Variant::kWidened) {
    loop.fp32_kernels = c.kernels.shrink[int(Dtype::kFp32)].packed;
    loop.widen = c.kernels.widen_panels;
  }
  loop.max_rows = in_pieces ? kMaxTileRows : int(kMaxDirectRows);
  loop.columns = std::min(config.shrink_columns / kPanel, c.kernels.bundle);
  loop.rows = rows;
  loop.first = first;
  loop.last = last;
  loop.step = c.steps(x.k);
  loop.steps = c.steps(x.count);
  loop.x_row = x.stride * 4;
  loop.out_row = kScratchStride * 4;
  loop.out_panel = kPanel * 4;
  loop.tail = kPanel;
  run_tiles(loop, panels, t);
}

void shrink(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows, const Rows& x,
            float* low) {
  constexpr int64_t kBlockPanels = kRankBlock / kPanel;
  const int64_t panels = c.a(pair).count;
  for (int64_t first = 0; first < panels; first += kBlockPanels, low += rows * kScratchStride)
    shrink_block(c, config, pair, rows, x, low, first, std::min(panels, first + kBlockPanels));
}

void finish_low(const Call& c, const Pair& pair, int64_t rows, float* low) {
  if (c.p.dtype != Dtype::kBf16) return;
  for (int64_t block = 0; block < rank_blocks(pair); ++block)
    c.kernels.round_rows(low + block * rows * kScratchStride, rows,
                         std::min<int64_t>(kRankBlock, pair.rank - block * kRankBlock));
}

void expand(const Call& c, const TileConfig& config, const Segment& s, int output, int64_t row,
            int64_t rows, const float* low, int64_t first, int64_t last) {
  const Pair& pair = c.pair(s, output);
  const Output& out = c.p.output[output];
  const Panels panels = c.b(pair, output);
  const ptrdiff_t size = ptrdiff_t(size_of(c.p.rows_dtype));
  const Variant variant = c.variants(pair, rows).expand;
  if (variant == Variant::kTileUnit)
    return expand_by_tiles(c, s, output, row, rows, low, first, last);
  const TileSet& set = c.kernels.expand[int(c.p.dtype)][int(c.p.rows_dtype)];
  const bool prefetching = variant == Variant::kPrefetching;
  Tile t{};
  t.x_stride = kScratchStride;
  t.out = static_cast<char*>(c.p.y) + (row * c.p.y_stride + out.column + first * kPanel) * size;
  t.in = t.out;
  t.out_stride = t.in_stride = c.p.y_stride;
  t.sign = float(s.sign);
  t.prefetch = config.prefetch * 64;
  TileLoop loop{};
  loop.kernels = prefetching ? set.prefetching : set.packed;
  if (!c.fixed_order && !prefetching) loop.first_kernels = set.prefetching;
  loop.kernel_rows = c.kernels.max_rows;
  loop.max_rows = prefetching ? int(kMaxDirectRows) : kMaxTileRows;
  if (variant == Variant::kWidened) {
    loop.widen = c.kernels.widen_panels;
    if (c.p.rows_dtype == Dtype::kFp32) {
      loop.fp32_kernels = c.kernels.expand[int(Dtype::kFp32)][int(Dtype::kFp32)].packed;
    } else {
      // The tiles of the merge add fp32 products to bf16 rows. They have at most kMaxDirectRows
      // rows.
      loop.fp32_kernels = c.kernels.merge[int(Dtype::kBf16)];
      loop.max_rows = int(kMaxDirectRows);
    }
  }
  loop.columns = std::min(config.expand_columns / kPanel, c.kernels.bundle);
  loop.rows = rows;
  loop.first = first;
  loop.last = last;
  loop.x_row = kScratchStride * 4;
  loop.out_row = loop.in_row = c.p.y_stride * size;
  loop.out_panel = loop.in_panel = kPanel * size;
  loop.tail = int32_t(out.d_out - (panels.count - 1) * kPanel);
  for (int64_t block = 0; block < rank_blocks(pair); ++block) {
    const int64_t rank = block * kRankBlock;
    t.x = low + block * rows * kScratchStride;
    loop.step = c.steps(rank);
    loop.steps = c.steps(std::min<int64_t>(kRankBlock, pair.rank - rank));
    run_tiles(loop, panels, t);
  }
}

}  // namespace vlora::atmm

#include "products.h"

namespace vlora::atmm {

float* row_scratch(int64_t floats) {
  thread_local cpu::Scratch scratch;
  return scratch.get(floats);
}

void shrink_block(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows,
                  const Rows& x, float* to, int64_t first, int64_t last) {
  const TileSet& set = c.kernels.shrink[int(c.p.dtype)];
  Tile t{};
  t.x = x.at;
  t.x_stride = x.stride;
  t.out = to;
  t.first = x.first;
  t.last = x.last;
  t.prefetch = config.prefetch * 64;
  Walk w{};
  // One panel leaves too few sums to fill the pipeline, however many rows there are.
  const bool stream = !c.one_order && (rows <= kFewRows || c.a(pair).count == 1);
  w.kernels = x.packed ? set.packed : stream ? set.stream : set.direct;
  w.max_rows = c.kernels.max_rows;
  if (!x.packed && !c.one_order && rows > kFewRows) w.bringing = set.stream;
  if (c.widened() && x.packed) {
    w.widened = c.kernels.shrink[int(Dtype::kFp32)].packed;
    w.widen = c.kernels.widen_panels;
  }
  w.most_rows = x.packed ? kMaxRows : int(kFewRows);
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
  walk(w, c.a(pair), t);
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
  const ptrdiff_t size = ptrdiff_t(size_of(c.p.dtype));
  const TileSet& set = c.kernels.expand[int(c.p.dtype)];
  const bool few = rows <= kFewRows && !c.one_order;
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
  if (c.widened() && !few) {
    // The merge's tiles add fp32 products to bf16 rows; they have no more than kFewRows.
    w.widened = c.kernels.merge[int(Dtype::kBf16)];
    w.widen = c.kernels.widen_panels;
    w.most_rows = int(kFewRows);
  }
  w.columns = std::min(config.expand_columns / kPanel, c.kernels.bundle);
  w.rows = rows;
  w.first = first;
  w.last = last;
  w.x_row = kRowStride * 4;
  w.out_row = w.in_row = c.p.y_stride * size;
  w.out_panel = w.in_panel = kPanel * size;
  w.tail = int32_t(out.d_out - (panels.count - 1) * kPanel);
  for (int64_t block = 0; block < rank_blocks(pair); ++block) {
    const int64_t rank = block * kRankBlock;
    t.x = low + block * rows * kRowStride;
    w.step = c.steps(rank);
    w.steps = c.steps(std::min<int64_t>(kRankBlock, pair.rank - rank));
    walk(w, panels, t);
  }
}

}  // namespace vlora::atmm

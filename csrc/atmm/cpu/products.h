// The two products of a block of rows: low = x A^T to scratch, y += sign * low B^T.
#pragma once

#include "atmm/operator.h"
#include "walk.h"

namespace vlora::atmm {

constexpr int64_t kRankBlock = kDepth;
// Ranks whose intermediate fits a row of scratch; larger ranks take several, one after another.

// One call's constants.
struct Call {
  const Kernels& kernels;
  const Problem& p;
  bool one_order;

  bool pairs() const { return p.dtype == Dtype::kBf16 && kernels.pairs_in_registers; }
  bool widened() const { return p.dtype == Dtype::kBf16 && !kernels.pairs_in_registers; }
  // Steps of depth for so many elements, and elements in so many steps.
  int64_t steps(int64_t elements) const {
    return p.dtype == Dtype::kBf16 ? ceil_div(elements, 2) : elements;
  }
  int64_t elements(int64_t steps) const { return p.dtype == Dtype::kBf16 ? steps * 2 : steps; }
  // Units of 4 bytes in a row of scratch for so many elements.
  int64_t units(int64_t elements) const {
    if (pairs()) return ceil_div(elements, 2);
    return widened() ? ceil_div(elements, 2) * 2 : elements;
  }

  const Pair& pair(const Segment& s, int output) const {
    return p.pairs[int64_t(s.slot) * p.outputs + output];
  }
  const char* x(int64_t row, int64_t k) const {
    return static_cast<const char*>(p.x) + (row * p.x_stride + k) * ptrdiff_t(size_of(p.rows_dtype));
  }
  bool readable() const {
    if (p.dtype == Dtype::kFp32) return true;
    if (p.d_in % 2 || (p.rows_dtype == Dtype::kFp32) == pairs()) return false;
    return !pairs() || p.x_stride % 2 == 0;
  }
  Paths paths(const TileConfig& config, const Pair& pair, int64_t rows) const {
    return paths_of({rows, p.dtype == Dtype::kBf16, pairs(), kernels.tiles != nullptr, readable(),
                     config.pack_rows, pair.rank <= kPanel, one_order});
  }
  Panels a(const Pair& pair) const {
    return {static_cast<const char*>(pair.a), ceil_div(pair.rank, kPanel), steps(p.d_in), p.bundle,
            has_narrow(pair.rank)};
  }
  Panels b(const Pair& pair, int output) const {
    return {static_cast<const char*>(pair.b), ceil_div(p.output[output].d_out, kPanel),
            steps(pair.rank), p.bundle, false};
  }
};

inline int64_t rank_blocks(const Pair& pair) { return ceil_div(pair.rank, kRankBlock); }
// Floats of the intermediate of so many rows: a block of rows of scratch for each block of ranks.
inline int64_t low_floats(const Pair& pair, int64_t rows) {
  return rank_blocks(pair) * rows * kRowStride;
}

// Rows of a product's left side, elements [k, k + count) of them.
struct Rows {
  const float* at;
  ptrdiff_t stride;  // units of 4 bytes
  RowsIn in;
  int64_t k, count;
  bool first, last;  // of the parts of the depth that are summed up
};

// Panels [first, last) of x A^T, all of one block of ranks, to rows of scratch.
void shrink_block(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows,
                  const Rows& x, float* to, int64_t first, int64_t last);

// All panels, to an intermediate of low_floats().
void shrink(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows, const Rows& x,
            float* low);

// The intermediate as the second product reads it.
void finish_low(const Call& c, const Pair& pair, int64_t rows, float* low);

// Panels [first, last) of one output's columns: y += sign * low B^T.
void expand(const Call& c, const TileConfig& config, const Segment& s, int output, int64_t row,
            int64_t rows, const float* low, int64_t first, int64_t last);

// Scratch for rows that cannot be read in place.
float* row_scratch(int64_t floats);

// Elements [from, to) of the depth, block by block, each made ready and passed to `use(Rows)`.
template <class Use>
void over_depth(const Call& c, const TileConfig& config, int64_t row, int64_t rows, int64_t from,
                int64_t to, const Use& use) {
  const bool one_pass = config.shrink_columns >= c.p.bundle * kPanel &&
                        rows <= c.kernels.max_rows[c.p.bundle - 1];
  // Without a depth of its own a configuration streams the panels, once; where they are passed
  // several times, in pieces that stay in L2 meanwhile.
  const int64_t steps = config.depth_block ? config.depth_block
                        : one_pass         ? c.steps(to - from)
                                           : panel_bytes() / (c.p.bundle * 64);
  const int64_t block = c.elements(steps);
  // (Where rows are does not depend on the pair.)
  const RowsIn in = c.paths(config, Pair{}, rows).rows;
  if (in == RowsIn::kPlace) {
    for (int64_t k = from; k < to; k += block)
      use(Rows{reinterpret_cast<const float*>(c.x(row, k)),
               c.pairs() ? c.p.x_stride / 2 : c.p.x_stride, in, k, std::min(block, to - k),
               k == from, k + block >= to});
    return;
  }
  if (in == RowsIn::kCopy) {
    const ptrdiff_t stride = ceil_div(c.units(to - from), 16) * 16 + 16;
    float* scratch = row_scratch(rows * stride);
    c.kernels.load_rows(c.p.rows_dtype, c.pairs(), c.x(row, from), c.p.x_stride, rows, to - from,
                        scratch, stride);
    use(Rows{scratch, stride, in, from, to - from, true, true});
    return;
  }
  const int64_t piece = std::min(block, c.pairs() ? 2 * kDepth : int64_t(kDepth));
  float* scratch = row_scratch(rows * kRowStride);
  for (int64_t k = from; k < to; k += piece) {
    const int64_t count = std::min(piece, to - k);
    c.kernels.load_rows(c.p.rows_dtype, c.pairs(), c.x(row, k), c.p.x_stride, rows, count, scratch,
                        kRowStride);
    use(Rows{scratch, kRowStride, in, k, count, k == from, k + piece >= to});
  }
}

}  // namespace vlora::atmm

// The two products of a block of rows: low = x A^T, stored in scratch, and y += sign * low B^T.
// "low" is the low-rank intermediate.
#pragma once

#include "atmm/operator.h"
#include "tile_loop.h"

namespace vlora::atmm {

// Ranks whose intermediate fits a row of scratch. Larger ranks take several blocks of ranks.
constexpr int64_t kRankBlock = kScratchDepth;

// Constants of one call of the operator.
struct Call {
  const Kernels& kernels;
  const Problem& p;
  bool fixed_order;

  // Whether bf16 matrices are multiplied as pairs, or their panels converted to fp32.
  bool multiplies_pairs() const { return p.dtype == Dtype::kBf16 && kernels.pairs_in_registers; }
  bool widens() const { return p.dtype == Dtype::kBf16 && !kernels.pairs_in_registers; }
  // Returns the number of steps of depth that this many elements take.
  int64_t steps(int64_t elements) const {
    return p.dtype == Dtype::kBf16 ? ceil_div(elements, 2) : elements;
  }
  int64_t elements(int64_t steps) const { return p.dtype == Dtype::kBf16 ? steps * 2 : steps; }
  // Returns the number of words that this many elements take in a row of scratch.
  int64_t scratch_words(int64_t elements) const {
    if (multiplies_pairs()) return ceil_div(elements, 2);
    return widens() ? ceil_div(elements, 2) * 2 : elements;
  }

  const Pair& pair(const Segment& s, int output) const {
    return p.pairs[int64_t(s.slot) * p.outputs + output];
  }
  const char* x(int64_t row, int64_t k) const {
    return static_cast<const char*>(p.x) +
           (row * p.x_stride + k) * ptrdiff_t(size_of(p.rows_dtype));
  }
  // Whether kernels can read rows of x in place: they are whole words and need no conversion.
  bool readable() const {
    if (p.dtype == Dtype::kFp32) return true;
    if (p.d_in % 2 || (p.rows_dtype == Dtype::kFp32) == multiplies_pairs()) return false;
    return !multiplies_pairs() || p.x_stride % 2 == 0;
  }
  Variants variants(const Pair& pair, int64_t rows) const {
    return variants_of({rows, p.dtype == Dtype::kBf16, multiplies_pairs(), kernels.tiles != nullptr,
                        readable(), pair.rank <= kPanel, fixed_order});
  }
  Panels a(const Pair& pair) const {
    return {static_cast<const char*>(pair.a), ceil_div(pair.rank, kPanel), steps(p.d_in), p.bundle,
            has_narrow_panel(pair.rank)};
  }
  Panels b(const Pair& pair, int output) const {
    return {static_cast<const char*>(pair.b), ceil_div(p.output[output].d_out, kPanel),
            steps(pair.rank), p.bundle, false};
  }
};

inline int64_t rank_blocks(const Pair& pair) { return ceil_div(pair.rank, kRankBlock); }
// Returns the floats of the intermediate of `rows` rows: a block of scratch rows per block of
// ranks.
inline int64_t low_floats(const Pair& pair, int64_t rows) {
  return rank_blocks(pair) * rows * kScratchStride;
}

// Left operand of the first product: elements [k, k + count) of some rows.
struct Rows {
  const float* data;
  ptrdiff_t stride;  // words
  RowSource source;
  int64_t k, count;
  bool first_part, last_part;  // whether these elements begin or end the depth of the product
};

// Computes panels [first, last) of x A^T, which belong to one block of ranks, to rows of scratch.
void shrink_block(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows,
                  const Rows& x, float* to, int64_t first, int64_t last);

// Computes all panels of x A^T to an intermediate that has low_floats() floats.
void shrink(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows, const Rows& x,
            float* low);

// Converts the intermediate to the type that the second product takes.
void finish_low(const Call& c, const Pair& pair, int64_t rows, float* low);

// Computes panels [first, last) of one output's columns: y += sign * low B^T.
void expand(const Call& c, const TileConfig& config, const Segment& s, int output, int64_t row,
            int64_t rows, const float* low, int64_t first, int64_t last);

// Returns this thread's scratch for rows that cannot be read in place.
float* row_scratch(int64_t floats);

// Prepares elements [from, to) of the depth in blocks, and calls `use(Rows)` for each block.
template <class Use>
void over_depth(const Call& c, const TileConfig& config, int64_t row, int64_t rows, int64_t from,
                int64_t to, const Use& use) {
  const bool one_pass =
      config.shrink_columns >= c.p.bundle * kPanel && rows <= c.kernels.max_rows[c.p.bundle - 1];
  // Without a depth block in the configuration, panels that are read once are read as one stream.
  // Panels that are read several times are read in pieces, which stay in L2 meanwhile.
  const int64_t steps = config.depth_block ? config.depth_block
                        : one_pass         ? c.steps(to - from)
                                           : panel_bytes() / (c.p.bundle * 64);
  const int64_t block = c.elements(steps);
  // The source of the rows does not depend on the pair.
  const RowSource source = c.variants(Pair{}, rows).rows;
  if (source == RowSource::kInPlace) {
    for (int64_t k = from; k < to; k += block)
      use(Rows{reinterpret_cast<const float*>(c.x(row, k)),
               c.multiplies_pairs() ? c.p.x_stride / 2 : c.p.x_stride, source, k,
               std::min(block, to - k), k == from, k + block >= to});
    return;
  }
  if (source == RowSource::kCopied) {
    const ptrdiff_t stride = ceil_div(c.scratch_words(to - from), 16) * 16 + 16;
    float* scratch = row_scratch(rows * stride);
    c.kernels.load_rows(c.p.rows_dtype, c.multiplies_pairs(), c.x(row, from), c.p.x_stride, rows,
                        to - from, scratch, stride);
    use(Rows{scratch, stride, source, from, to - from, true, true});
    return;
  }
  const int64_t piece =
      std::min(block, c.multiplies_pairs() ? 2 * kScratchDepth : int64_t(kScratchDepth));
  float* scratch = row_scratch(rows * kScratchStride);
  for (int64_t k = from; k < to; k += piece) {
    const int64_t count = std::min(piece, to - k);
    c.kernels.load_rows(c.p.rows_dtype, c.multiplies_pairs(), c.x(row, k), c.p.x_stride, rows,
                        count, scratch, kScratchStride);
    use(Rows{scratch, kScratchStride, source, k, count, k == from, k + piece >= to});
  }
}

}  // namespace vlora::atmm

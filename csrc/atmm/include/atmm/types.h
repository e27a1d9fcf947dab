// Plain types of the adaptive-tiling matrix operator (ATMM). They need neither torch nor Python and
// own nothing: every pointer belongs to the caller and must outlive the call.
#pragma once

#include "runtime/types.h"

namespace vlora::atmm {

// Rows of a packed matrix that are interleaved: one vector of the kernels.
constexpr int kPanel = kLanes;

// Maximum number of panels interleaved step by step. A register tile that covers them reads one
// stream of memory.
constexpr int kMaxBundle = 4;

// Maximum number of projections that share an input. q, k and v are three.
constexpr int kMaxOutputs = 8;

enum class Operation : uint8_t { kApply = 0, kMerge = 1 };

// Rows start … start + length - 1 use the adapter in `slot`, times `sign` (+1 or -1).
struct Segment {
  int64_t start;
  int64_t length;
  int32_t slot;
  int32_t sign;
};

// One adapter's packed matrices for one projection. The rank is 0 if the projection is not
// targeted. For task heads, rank is the number of classes, a the packed weight, and b the bias in
// fp32.
struct Pair {
  int32_t rank;
  const void* a;
  const void* b;
};

struct Output {
  int64_t d_out;
  int64_t column;  // the first of its columns in a row of y
};

// y[segment, output] += sign * (x A^T) B^T, for all segments and outputs.
struct Problem {
  Dtype dtype;       // of the matrices
  Dtype rows_dtype;  // of x and y: the matrices' type, or fp32
  int64_t rows;
  int64_t d_in;
  const void* x;
  int64_t x_stride;  // elements between rows
  void* y;
  int64_t y_stride;
  int32_t outputs;
  const Output* output;
  int64_t slots;
  const Pair* pairs;  // [slots][outputs]
  int32_t bundle;     // panels interleaved when the matrices were packed: a power of two
};

// M = W + sign * B A for one matrix, or M = W for rank 0. A: [rank, d_in] and B: [d_out, rank],
// row-major fp32.
struct Merge {
  int64_t offset;  // of W and of M in their slabs, in elements
  int64_t d_out;
  int64_t d_in;
  int64_t rank;
  const float* a;
  const float* b;
};

// The division of a problem. All sizes are rows, columns or depth of the operands.
struct TileConfig {
  int32_t row_block;       // rows whose rank-r intermediate stays in cache between the products
  int32_t shrink_columns;  // columns of the intermediate in a register tile: 16, 32, 48 or 64
  int32_t expand_columns;  // columns of y in a register tile
  int32_t depth_block;     // depth of x A^T computed at a time; 0: all of it
  int32_t prefetch;        // cache lines to prefetch ahead in a panel; 0: no software prefetch
  int32_t column_block;    // merge: columns of A packed at a time; apply: 0
};

}  // namespace vlora::atmm

// Plain types of the adaptive-tiling matrix operator. No torch, no Python, no ownership: every
// pointer is the caller's and outlives the call.
#pragma once

#include "runtime/types.h"

namespace vlora::atmm {

constexpr int kPanel = kLanes;
// Rows of a packed matrix that lie interleaved: a vector of the kernels.

constexpr int kMaxBundle = 4;
// Panels that may lie interleaved, step by step: a tile of so many reads one stream of memory.

constexpr int kMaxOutputs = 8;
// Projections that share an input: q, k, v are three.

enum class Operation : uint8_t { kApply = 0, kMerge = 1 };

// Rows start … start + length - 1 go through adapter `slot`, times `sign` (+1 or -1).
struct Segment {
  int64_t start;
  int64_t length;
  int32_t slot;
  int32_t sign;
};

// One adapter's packed matrices for one projection; rank 0: not targeted.
// For heads: rank = classes, a = packed weight, b = bias in fp32.
struct Pair {
  int32_t rank;
  const void* a;
  const void* b;
};

struct Output {
  int64_t d_out;
  int64_t column;  // first column in a row of y
};

// y[segment, output] += sign * (x A^T) B^T, for all segments and outputs.
struct Problem {
  Dtype dtype;       // of the matrices
  Dtype rows_dtype;  // of x and y: the same, or fp32
  int64_t rows;
  int64_t d_in;
  const void* x;
  int64_t x_stride;  // elements from row to row
  void* y;
  int64_t y_stride;
  int32_t outputs;
  const Output* output;
  int64_t slots;
  const Pair* pairs;  // [slots][outputs]
  int32_t bundle;     // that they were packed with: a power of two
};

// M = W + sign * B A, one matrix. A: [rank, d_in], B: [d_out, rank], row-major fp32. Rank 0: M = W.
struct Merge {
  int64_t offset;  // of W and M in their slabs, in elements
  int64_t d_out;
  int64_t d_in;
  int64_t rank;
  const float* a;
  const float* b;
};

// How a problem is cut. All sizes in rows, columns or depth of the operands.
struct TileConfig {
  int32_t row_block;       // rows whose rank-r intermediate stays in cache between the products
  int32_t shrink_columns;  // columns of the intermediate held in registers: 16, 32, 48 or 64
  int32_t expand_columns;  // the same of y
  int32_t depth_block;     // depth of x A^T done at a time; 0: all (rows are then not packed)
  int32_t prefetch;        // cache lines ahead in a panel; 0: no software prefetch
  bool pack_rows;          // copy the row block so that its rows lie a constant stride apart
  int32_t column_block;    // merge: columns of A packed at a time; 0 elsewhere
};

}  // namespace vlora::atmm

// Interface of a unit that multiplies tiles of bf16 pairs: AMX, or its emulation in plain C++.
//
// A step is a pair of neighbouring bf16 values along the depth of a product.
#pragma once

#include "runtime/dispatch.h"

namespace vlora::runtime {

// Number of rows of a tile, and number of steps in a tile of a factor.
constexpr int kAmxRows = 16;
// A block of sums is at most two tiles of rows by two panels of 16 columns.
constexpr int kAmxBlockRows = 2 * kAmxRows;
constexpr int kAmxBlockPanels = 2;
// Number of bf16 limbs that represent an fp32 value exactly (fp32_limbs.h).
constexpr int kLimbs = 3;

// How sums are written to memory. Streaming stores bypass the caches and write only full lines.
enum class Store { kOverwrite, kStream, kAdd };

// out[i, n] (+)= sum over k of left[i, k] * right[n, k], summed in fp32.
struct TileProduct {
  const void* left;       // rows of bf16 pairs
  ptrdiff_t left_bytes;   // bytes between rows
  int rows;               // 1 … kAmxBlockRows
  const void* right;      // panels: each step has 16 contiguous pairs, one for each column
  ptrdiff_t step_bytes;   // bytes between steps
  ptrdiff_t panel_bytes;  // bytes between panels
  int panels;             // 1 … kAmxBlockPanels
  int64_t steps;
  float* out;            // panel n begins at out + 16 n
  ptrdiff_t out_stride;  // floats between rows
  bool first;            // whether the sums start from zero instead of `out`
};

struct TileUnit {
  // Computes the product. Configures the tile registers, which the thread's KernelScope releases.
  void (*multiply)(const TileProduct&);
};

// Returns the tile unit of an instruction set, or null if it has none.
const TileUnit* tile_unit(Isa isa);

}  // namespace vlora::runtime

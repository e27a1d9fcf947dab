// Products of int8 weights with rows of x that are quantized to int8, too.
//
// The values of x in a group of kDynamicGroup are unit * integer. The unit is the largest magnitude
// of the group / 127, and the integers are rounded to nearest, ties to even. W has one scale for
// each output:
//
//   y[t, n] = bias[n] + scale[n] * (sum over groups of unit[t, group] * sum of integer products).
//
// Sums of integers are exact, in 32 bits and in fp32. The groups are added in fp32 in their order,
// without fused multiply-adds. So a row of y has the same bits in every kernel, for any number of
// threads, and whatever rows are multiplied with it.
#pragma once

#include "quantized/quantized.h"

namespace vlora::quantized {

// A whole number of blocks. 64 products of bytes are less than 2^24, up to which fp32 is exact.
constexpr int64_t kDynamicGroup = 64;

// Outputs in a panel of W. A panel has the first 4 values of each of its rows, then the next 4 of
// each, and so on. Rows that fill no panel follow in order.
constexpr int64_t kDynamicPanel = kTilePanelRows;

// Packed x. A tile has a line of each of its rows for the first block of depth, then for the next.
struct DynamicRows {
  char* lines;       // [tiles][blocks][rows of the tile][DynamicKernels::line_bytes]
  float* units;      // [rows][groups]; NaN if the group has a value that is not finite
  int32_t* offsets;  // [rows][groups]: -128 times the sum of the integers, if `run` reads it
  int64_t tiles, blocks, groups;
};

// The kernels of an instruction set.
struct DynamicKernels {
  int64_t tile_rows;   // maximum rows of x in a tile
  int64_t line_bytes;  // of the integers of a row in a block
  // Packs tiles [from, until) of x.
  void (*pack)(const Product&, const DynamicRows&, int64_t from, int64_t until);
  // Multiplies panels [from, to). Rows of W that fill no panel are one more panel.
  void (*run)(const Product&, const DynamicRows&, int64_t from, int64_t to);
  // Multiplies bytes in a loop that stays in registers. Returns the number of operations: two for
  // each product of two bytes.
  double (*peak)(int64_t rounds);
};
// Returns null if there are no kernels of their own for the instruction set.
const DynamicKernels* dynamic_kernels(runtime::Isa isa);

// Returns the first row of x in a tile. Rows are divided evenly.
inline int64_t dynamic_tile_begin(const Product& p, const DynamicRows& x, int64_t tile) {
  return p.rows * tile / x.tiles;
}

// W is int8 with one scale for each output, in panels of kDynamicPanel rows.
void multiply_dynamic(const Product& product, int threads);

// Returns whether the instruction set in use multiplies bytes as fast as it could (VNNI). Other
// CPUs widen them to 16 bits.
bool multiplies_bytes();

// Returns the instruction set whose vectors multiply bytes in the kernels in use.
runtime::Isa isa_of_bytes();

// Runs the loop of `peak` of the kernels in use once on each thread. Returns the operations done.
double multiply_bytes(int64_t rounds, int threads);

}  // namespace vlora::quantized

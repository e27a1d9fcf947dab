// What an instruction set provides: register-tile kernels, and the copies around them. The loops
// over blocks, the threads and the choice of tiles are common to all (walk.h, apply.cpp).
#pragma once

#include "atmm/types.h"
#include "runtime/dispatch.h"
#include "runtime/tile_unit.h"

namespace vlora::atmm {

constexpr int kDepth = 256;
// Most steps of depth in a packed row block. A step is one fp32 value or one pair of bf16.
constexpr int kRowStride = kDepth + 16;
// Units of 4 bytes from row to row of scratch. Known to the compiler, so that a tile's rows need
// one address register; 17 cache lines, so that rows do not fall on the same cache sets.
constexpr int kMaxColumns = kMaxBundle;  // panels in registers
constexpr int kNarrow = kMaxColumns;    // a narrow panel's place among them
constexpr int kMaxRows = 24;

// One register tile of neighbouring panels of a bundle, repeated over `groups` bundles.
struct Tile {
  const void* x;          // rows of scratch (stride kRowStride), or of the caller (x_stride)
  ptrdiff_t x_stride;     // units of 4 bytes
  const char* panels;     // the first panel, at the first depth step
  ptrdiff_t step_bytes;   // from step to step; the tile's panels are 64 bytes apart
  ptrdiff_t group_bytes;  // from bundle to bundle
  int64_t steps;
  int64_t groups;
  void* out;              // shrink: scratch fp32, stride kRowStride; expand: y; merge: M
  ptrdiff_t out_stride;   // elements
  const void* in;         // expand, merge: what is added to
  ptrdiff_t in_stride;
  ptrdiff_t in_ahead;     // elements ahead of a tile's own that are fetched while it is computed
  int32_t group_columns;  // of `out` and `in`, from bundle to bundle
  int32_t tail;           // valid columns in the last panel of the last group
  bool first, last;       // shrink: start from zero, not from `out`; no more depth comes
  float sign;
  ptrdiff_t prefetch;     // bytes ahead in the panels
};

using TileKernel = void (*)(const Tile&);

// Kernels by [columns in panels - 1, or kNarrow][rows - 1]; null where registers do not suffice.
struct TileSet {
  TileKernel packed[kMaxColumns + 1][kMaxRows];  // rows kRowStride apart
  TileKernel direct[kMaxColumns + 1][kMaxRows];  // rows x_stride apart
  TileKernel stream[kMaxColumns + 1][kMaxRows];  // direct, panels fetched ahead, several chains of sums
};

// Factors of a merge as limbs of bf16 (merge_limbs.h).
using runtime::kLimbs;
constexpr int kLimbDepth = 2 * runtime::kTile;  // values of depth that a tile takes
constexpr int kLimbRows = runtime::kTileRows;
constexpr int kLimbColumns = runtime::kTilePanels * kPanel;  // of a block
constexpr int kLimbGroup = 2;                            // blocks whose sums are added at a time

// out = in + sign * left right, of up to kLimbRows rows.
struct LimbRows {
  const uint16_t* left;   // [kLimbs][kLimbRows][depth]
  const uint16_t* right;  // [block of columns][kLimbs][depth][kLimbColumns], tile by tile
  int64_t depth;          // a multiple of kLimbDepth
  int rows;
  int64_t columns;
  const void* in;
  const void* next;  // what `in` will be, fetched meanwhile; or null
  void* out;
  ptrdiff_t stride;  // elements, of all three
  float sign;
};

struct Limbs {
  void (*of_rows)(const float* b, int64_t rank, int rows, int64_t depth, uint16_t* to);
  void (*of_columns)(const float* a, ptrdiff_t stride, int64_t rank, int64_t columns, int64_t depth,
                     uint16_t* to);
  void (*merge[kDtypes])(const LimbRows&);
  void (*merge_streaming[kDtypes])(const LimbRows&);  // the same, stores past the caches
};

struct Kernels {
  const char* name;
  int bundle;  // panels that its tiles like to find interleaved
  bool pairs_in_registers;  // bf16 rows are multiplied as they are; else rows are made fp32 first
  int max_rows[kMaxColumns];
  TileSet shrink[kDtypes];           // by Dtype of the matrices
  TileSet expand[kDtypes][kDtypes];  // and of y; bf16 is not added to by fp32 matrices
  TileKernel merge[2][kMaxColumns][kMaxRows];            // rows x_stride apart
  TileKernel merge_streaming[2][kMaxColumns][kMaxRows];  // the same, stores past the caches
  TileKernel merge_apart[kMaxColumns][kMaxRows];  // bf16, even columns first in each panel; or null
  // rows x count elements to scratch: fp32 units, or pairs of bf16; an odd last one with zero.
  void (*load_rows)(Dtype, bool pairs, const void* x, ptrdiff_t stride, int64_t rows, int64_t count,
                    void* to, ptrdiff_t to_stride);
  // fp32 rows of scratch to pairs of bf16, in place; an odd count is padded with zero.
  void (*round_rows)(float* scratch, int64_t rows, int64_t count);
  // Panels of pairs of bf16, `columns` of each bundle of a tile, to fp32: two steps for each.
  void (*widen_panels)(const Tile&, int columns, float* to);
  // Lines of a narrow panel of pairs, whose two steps lie pair by pair in turn, to one step after another.
  void (*split_narrow)(const void* lines, int64_t count, void* to);
  const runtime::TileUnit* tiles;  // multiplies tiles of pairs; null: none
  Limbs limbs;                 // where it does
  // Of blocks of few rows where pairs are multiplied slowly: panels are made fp32 in registers. Or null.
  const Kernels* few;
  // y += sign * sums.
  void (*add_sums)(Dtype, void* y, ptrdiff_t y_stride, const float* sums, ptrdiff_t sums_stride,
                   int64_t rows, int64_t columns, float sign);
};

// Those of an instruction set.
const Kernels& kernels(runtime::Isa isa);

}  // namespace vlora::atmm

// The kernels that each instruction set provides: register tiles, and copies to and from their
// scratch memory. The loops over blocks and threads and the choice of tiles are common to all
// instruction sets (cpu/tile_loop.h, cpu/apply.cpp).
//
// A step is one unit of the depth in a packed matrix: one fp32 value, or one pair of bf16. A word
// is 4 bytes: one fp32 value, or one pair of bf16.
#pragma once

#include "atmm/types.h"
#include "runtime/dispatch.h"
#include "runtime/tile_unit.h"

namespace vlora::atmm {

// Maximum number of steps in a row of scratch.
constexpr int kScratchDepth = 256;

// Words between rows of scratch. It is a constant, so that the rows of a tile need only one address
// register. It is 17 cache lines, so that rows do not fall on the same cache sets.
constexpr int kScratchStride = kScratchDepth + 16;

// Maximum number of panels in a register tile.
constexpr int kMaxTilePanels = kMaxBundle;

// Index of narrow panels in arrays that are otherwise indexed by the number of panels less one.
constexpr int kNarrowIndex = kMaxTilePanels;

// Maximum number of rows in a register tile.
constexpr int kMaxTileRows = 24;

// The arguments of a register-tile kernel, which computes neighbouring panels of a bundle, repeated
// over `groups` bundles.
struct Tile {
  const void* x;          // rows in scratch (kScratchStride apart) or of the caller (x_stride)
  ptrdiff_t x_stride;     // words
  const char* panels;     // the first panel, at the first step
  ptrdiff_t step_bytes;   // bytes between steps; the panels of a tile are 64 bytes apart
  ptrdiff_t group_bytes;  // bytes between bundles
  int64_t steps;
  int64_t groups;
  void* out;             // shrink: fp32 scratch, kScratchStride apart; expand: y; merge: M
  ptrdiff_t out_stride;  // elements
  const void* in;        // expand, merge: the values to which the product is added
  ptrdiff_t in_stride;
  ptrdiff_t in_ahead;     // elements of `in` beyond the tile that are prefetched
  int32_t group_columns;  // columns of `out` and `in` between bundles
  int32_t tail;           // valid columns in the last panel of the last group
  bool first_part;        // shrink: the sums start from zero, not from `out`
  bool last_part;         // shrink: no more depth follows
  float sign;
  ptrdiff_t prefetch;  // bytes to prefetch ahead in the panels
};

using TileKernel = void (*)(const Tile&);

// Kernels by [panels - 1, or kNarrowIndex][rows - 1]; null if there are not enough registers.
struct TileSet {
  // For rows kScratchStride apart.
  TileKernel packed[kMaxTilePanels + 1][kMaxTileRows];
  // For rows x_stride apart, in the first product only.
  TileKernel direct[kMaxTilePanels + 1][kMaxTileRows];
  // Like direct, with software prefetch of the panels and several chains of sums.
  TileKernel prefetching[kMaxTilePanels + 1][kMaxTileRows];
};

// Factors of a merge split into bf16 limbs (cpu/merge_limbs.h).
using runtime::kLimbs;
constexpr int kLimbDepth = 2 * runtime::kAmxRows;  // values of depth that one tile takes
constexpr int kLimbRows = runtime::kAmxBlockRows;
constexpr int kLimbColumns = runtime::kAmxBlockPanels * kPanel;  // columns of a block
constexpr int kLimbGroup = 2;  // number of blocks whose sums are added to W together

// out = in + sign * left right, for up to kLimbRows rows.
struct LimbRows {
  const uint16_t* left;   // [kLimbs][kLimbRows][depth]
  const uint16_t* right;  // [block of columns][kLimbs][depth][kLimbColumns], tile by tile
  int64_t depth;          // a multiple of kLimbDepth
  int rows;
  int64_t columns;
  const void* in;
  const void* next;  // `in` of the next call, which is prefetched; or null
  void* out;
  ptrdiff_t stride;  // elements between rows of in, next and out
  float sign;
};

struct Limbs {
  void (*of_rows)(const float* b, int64_t rank, int rows, int64_t depth, uint16_t* to);
  void (*of_columns)(const float* a, ptrdiff_t stride, int64_t rank, int64_t columns, int64_t depth,
                     uint16_t* to);
  void (*merge[kDtypes])(const LimbRows&);
  void (*merge_streaming[kDtypes])(const LimbRows&);  // with stores that bypass the caches
};

struct Kernels {
  const char* name;
  int bundle;               // number of panels that its tiles read interleaved
  bool pairs_in_registers;  // whether bf16 pairs are multiplied directly; else rows become fp32
  int max_rows[kMaxTilePanels];      // rows of the tallest tile, by panels - 1
  TileSet shrink[kDtypes];           // by type of the matrices
  TileSet expand[kDtypes][kDtypes];  // by type of the matrices and of y; [kFp32][kBf16] is empty
  // By type of W, for rows x_stride apart.
  TileKernel merge[kDtypes][kMaxTilePanels][kMaxTileRows];
  // Like `merge`, with stores that bypass the caches; null if bundle is 1.
  TileKernel merge_streaming[kDtypes][kMaxTilePanels][kMaxTileRows];
  // bf16 merge of panels whose even columns come first; null if a panel is one register.
  TileKernel merge_deinterleaved[kMaxTilePanels][kMaxTileRows];
  // Copies rows x count elements to scratch, as fp32 or as pairs of bf16. An odd last element is
  // padded with zero.
  void (*load_rows)(Dtype, bool pairs, const void* x, ptrdiff_t stride, int64_t rows, int64_t count,
                    void* to, ptrdiff_t to_stride);
  // Converts fp32 rows of scratch to pairs of bf16 in place. An odd count is padded with zero.
  void (*round_rows)(float* scratch, int64_t rows, int64_t count);
  // Converts bf16 pairs to fp32, in `columns` panels of each of a tile's bundles. Each step becomes
  // two steps.
  void (*widen_panels)(const Tile&, int columns, float* to);
  // Separates the two steps interleaved in each line of a narrow panel of bf16 pairs.
  void (*deinterleave_narrow)(const void* lines, int64_t count, void* to);
  const runtime::TileUnit* tiles;  // multiplies tiles of bf16 pairs; null if there is none
  Limbs limbs;                     // filled if `tiles` is not null
  // Kernels for small blocks of rows on CPUs that multiply bf16 pairs slowly, or null. They convert
  // panels to fp32 in registers.
  const Kernels* small_blocks;
  // y += sign * sums.
  void (*add_sums)(Dtype, void* y, ptrdiff_t y_stride, const float* sums, ptrdiff_t sums_stride,
                   int64_t rows, int64_t columns, float sign);
};

// Returns the kernels of an instruction set.
const Kernels& kernels(runtime::Isa isa);

}  // namespace vlora::atmm

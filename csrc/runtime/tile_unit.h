// Products by a unit that multiplies tiles of bf16 pairs (AMX), or by its twin in plain C++.
#pragma once

#include "runtime/dispatch.h"

namespace vlora::runtime {

constexpr int kTile = 16;           // rows of a tile, and steps (pairs of depth) that it takes at a time
constexpr int kTileRows = 2 * kTile;  // of one product: two tiles by two
constexpr int kTilePanels = 2;
constexpr int kLimbs = 3;            // of bf16, that make a value of fp32

// How a tile of sums goes to memory: in place of what is there, so past the caches (whole lines only), or
// added to it.
enum class Stored { kPlain, kPastCaches, kAdded };

// out[i, n] (+)= sum over the depth of left[i, k] right[n, k], in fp32.
struct TileProduct {
  const void* left;       // rows of bf16 pairs, as they lie in memory
  ptrdiff_t left_bytes;   // from row to row
  int rows;               // 1 … kTileRows
  const void* right;      // panels: for every step 16 pairs side by side, one of each column
  ptrdiff_t step_bytes;   // from step to step
  ptrdiff_t panel_bytes;  // from panel to panel
  int panels;             // 1 … kTilePanels
  int64_t steps;          // pairs of depth
  float* out;             // of panel n from out + 16 n on
  ptrdiff_t out_stride;   // floats
  bool first;             // the sums begin at zero, else at `out`
};

struct TileUnit {
  void (*multiply)(const TileProduct&);
  // After a thread's last product: the unit's registers are no longer in use.
  void (*release)();
};

// Null where the instruction set has none.
const TileUnit* tile_unit(Isa isa);

}  // namespace vlora::runtime

// Constants of the kernels for int4 weights in panels of 16 rows on a tile unit. Included after the
// tile registers and the lines of an instruction set (lines_amx.h or lines_twin.h).
#pragma once

#include "quantized/quantized.h"
#include "runtime/fp32_limbs.h"
#include "runtime/tile_product.h"

namespace vlora::quantized::VLORA_ISA {

using runtime::kAmxRows;
using runtime::kLimbs;
using U = TileRegisters;

// Bytes of a line of a tile, of a tile, and of the stored integers of a tile.
constexpr int64_t kTileLine = 64, kTile = kAmxRows * kTileLine, kStoredTile = kTile / 4;
// Registers of stored integers in a tile.
constexpr int kQuarters = 4;
static_assert(kTilePanelRows == kAmxRows && kTilePanelRows == kLanes && kMinGroup == 2 * kAmxRows);
// Bytes that the values, scales and zeros of W are prefetched ahead, into L1.
constexpr int64_t kValuesAhead = 2048, kScalesAhead = 2048, kZerosAhead = 512;
// Steps that are converted before they are scaled. Products start two steps ahead, so this must be
// at least 3.
constexpr int kStepsAhead = 4;
// Tiles of sums in memory, and floats of one.
constexpr int kSumTiles = 2, kSumFloats = kTile / 4;
// Tiles of depth that are converted together for several tiles of rows of x, in L1: integers of one
// panel, and rounded weights of two panels, of which there are two buffers.
constexpr int kIntegerTiles = 16, kRoundedTiles = 8;
static_assert(kSumTiles + kIntegerTiles + 4 * kStepsAhead <= kPanelScratch);
static_assert(2 * 2 * kRoundedTiles <= kPanelScratch);

VLORA_INLINE void store_one(R values, float* to, bool streaming) {
  if (streaming)
    values.stream(to);
  else
    values.store(to);
}

}  // namespace vlora::quantized::VLORA_ISA

// Gemm of fp32 rows with an fp32 matrix on a tile unit. Both are split into limbs
// (runtime/fp32_limbs.h).
#pragma once

#include "gemm/gemm_amx_epilogue.h"

namespace vlora::gemm::VLORA_ISA {

using runtime::kLimbs;
// Bytes of the limbs of two tiles of W.
constexpr int64_t kLimbTileBytes = kLimbs * 2 * kTileBytes;
// Maximum number of tiles along the depth of a chunk of W. Its 30 KiB of limbs stay in L1 while the
// panels are read.
constexpr int64_t kLimbChunkTiles = 5;
static_assert(kLimbChunkTiles * kLimbTileBytes <= kAmxScratch * 4);
// Number of products of limbs per tile of depth.
constexpr int64_t kLimbProducts = 6;
// Number of rows of W that are split after a product. Six products suffice for a tile's 32 rows.
constexpr int64_t kSplitRows = 8;

// Splits rows of W into limbs in scratch, a few rows at a time between the products.
class SplitRows {
 public:
  SplitRows() = default;
  // Tiles [from, from + tiles) of the depth of a piece's rows.
  SplitRows(const Product& p, const Slice& slice, const Piece& piece, int64_t from, int64_t tiles,
            char* to)
      : stride_(p.k), depth_(slice.count - from * kTileDepth), tiles_(tiles), to_(to) {
    const TileRows rows(p, piece.from);
    for (int i = 0; i < 2; ++i) {
      w_[i] = static_cast<const float*>(p.w) + rows.row[i] * p.k + slice.from + from * kTileDepth;
      rows_[i] = rows.rows[i];
    }
  }

  // Splits kSplitRows more rows if they belong to a tile of depth before `until`.
  VLORA_INLINE void advance(int64_t until) {
    if (tile_ >= until || finished()) return;
    const int64_t half = next_ / kAmxRows, row = next_ % kAmxRows;
    const float* w = w_[half] + row * stride_;
    char* to = to_ + half * kTileBytes + row * kLine;
    if (depth_ >= kTileDepth && row + kSplitRows <= rows_[half]) {
#pragma GCC unroll 8
      for (int i = 0; i < kSplitRows; ++i, w += stride_)
        store_limbs(split_truncated(Fp32Line::load(w)), to + i * kLine, 2 * kTileBytes);
    } else {
      for (int i = 0; i < kSplitRows && row + i < rows_[half]; ++i, w += stride_)
        store_limbs(split_truncated(Fp32Line::load_some(w, int(depth_))), to + i * kLine,
                    2 * kTileBytes);
    }
    if ((next_ += kSplitRows) < kAmxBlockRows) return;
    next_ = 0, ++tile_;
    depth_ -= kTileDepth;
    to_ += kLimbTileBytes;
    for (int i = 0; i < 2; ++i) w_[i] += kTileDepth;
  }
  bool finished() const { return tile_ >= tiles_; }
  void finish() {
    while (!finished()) advance(tiles_);
  }

 private:
  const float* w_[2] = {};
  int64_t rows_[2] = {}, stride_ = 0, depth_ = 0, tiles_ = 0, tile_ = 0, next_ = 0;
  char* to_ = nullptr;
};

// Multiplies two tiles of rows of W with one or two panels over `tiles` tiles of depth.
// between(tile) runs after each of the six products of a tile of depth. The products are ordered so
// that each limb of x is loaded once. A merge orders them by magnitude (atmm/cpu/merge_limbs.h), so
// its sums differ.
template <bool kSecond, class Work>
void multiply_limbs(const char* w, const char* x, ptrdiff_t panel_bytes, int64_t tiles, float* sums,
                    bool first, const Work& between) {
  using Block = TileBlock<2, kSecond ? 2 : 1>;
  if (first)
    Block::zero();
  else
    Block::template load<true>(sums, kSumStride);
  for (int64_t tile = 0; tile < tiles; ++tile, w += kLimbTileBytes, x += kLimbs * kTileBytes) {
    const auto left = [&](int limb) {
      Block::load_left(w + limb * 2 * kTileBytes, kLine, kTileBytes);
    };
    const auto right = [&](int limb) {
      Block::template load_right<true>(x + limb * kTileBytes, kLine, panel_bytes);
    };
    const auto multiply = [&] {
      Block::multiply();
      between(tile);
    };
    left(0), right(2), multiply();
    right(1), multiply();
    left(1), multiply();
    right(0), multiply();
    left(0), multiply();
    left(2), multiply();
  }
  Block::store(sums, kSumStride);
}

// Multiplies two tiles of rows of W with all panels of a piece. scratch: limbs of a chunk of W,
// then the sums. While the last pair of panels is multiplied, the limbs of the next chunk overwrite
// those of the current one, one tile behind the products. The last tile is overwritten while the
// first tile of the next chunk is multiplied.
inline void gemm_limbs(const Product& p, const Slice& slice, const char* panels, const Piece& piece,
                       char* scratch) {
  const int64_t depth = ceil_div(slice.count, kTileDepth),
                panel_bytes = depth * kLimbs * kTileBytes;
  const int64_t pairs = ceil_div(piece.panels, 2);
  const int64_t chunks = ceil_div(depth, kLimbChunkTiles), chunk = ceil_div(depth, chunks);
  auto* const sums = reinterpret_cast<float*>(scratch + kAmxScratch * 4);
  configure(kAmxRows, kAmxRows, kAmxRows);
  PrefetchRows prefetch(p, slice, piece.next);
  const int64_t lines = ceil_div(prefetch.lines(), depth * pairs * kLimbProducts);
  const Store how = store_of(p, slice, piece);
  Epilogue epilogue;
  SplitRows current(p, slice, piece, 0, chunk, scratch);
  current.finish();
  for (int64_t k = 0; k < depth; k += chunk) {
    const int64_t tiles = depth - k < chunk ? depth - k : chunk, after = depth - k - tiles;
    const bool last = after == 0;
    const int64_t quarters = last ? ceil_div(Epilogue::kQuarters, tiles * kLimbProducts) : 0;
    SplitRows next(p, slice, piece, k + tiles, after < chunk ? after : chunk, scratch);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const char* const x =
          panels + (piece.panel + 2 * pair) * panel_bytes + k * kLimbs * kTileBytes;
      float* const to = sums + pair * kPairFloats;
      PrefetchResults results;
      if (last && how != Store::kStream) results = PrefetchResults(p, piece, 2 * pair);
      const bool replace = pair + 1 == pairs;
      const auto between = [&](int64_t tile) {
        prefetch.advance(lines);
        epilogue.advance(quarters);
        results.advance(2 * quarters);
        if (!current.finished()) {
          current.advance(chunk);
        } else if (replace) {
          next.advance(tile);
        }
      };
      if (2 * pair + 1 < piece.panels) {
        multiply_limbs<true>(scratch, x, panel_bytes, tiles, to, k == 0, between);
      } else {
        multiply_limbs<false>(scratch, x, panel_bytes, tiles, to, k == 0, between);
      }
      if (last) {
        epilogue.finish();
        epilogue = Epilogue(p, piece, 2 * pair, to, how);
      }
    }
    current = next;
    // If the last chunk is short, its products may end before its last tile has been split.
    if (after < chunk) current.finish();
  }
  epilogue.finish();
}

inline void pack_limbs(const Product& p, const Slice& slice, char* to, int64_t from,
                       int64_t until) {
  pack_panels_of_tiles<kLimbs>(p, slice, to, from, until, pack_limb_columns);
}

}  // namespace vlora::gemm::VLORA_ISA

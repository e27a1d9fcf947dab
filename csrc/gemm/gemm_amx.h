// Gemm on a tile unit: rows of x, rounded to bf16, times a bf16 matrix. W is the left factor and x
// the right one. Both are packed tile by tile: rows of W are often a power of two apart and would
// share few sets of L1.
#pragma once

#include "gemm/gemm_amx_epilogue.h"

namespace vlora::gemm::VLORA_ISA {

// Maximum number of tiles along the depth of a chunk of W. A chunk has two rows of tiles (40 KiB)
// and stays in L1 while the panels are read.
constexpr int64_t kChunkTiles = 20;
static_assert(kChunkTiles * 2 * kTileBytes == kAmxScratch * 4);

// Maximum number of panels for which W is read in place. With so few, the copy costs more than the
// cache misses of rows that are a power of two apart.
constexpr int64_t kMaxInPlacePanels = 8;

// Copies tiles [from, from + count) of the depth of a piece's rows of W to scratch, for rows or
// depths that end within a tile.
inline void copy_partial_tiles(const Product& p, const Slice& slice, const Piece& piece,
                               int64_t from, int64_t count, char* to) {
  const TileRows tiles(p, piece.from);
  for (int64_t k = from; k < from + count; ++k)
    for (int i = 0; i < 2; ++i, to += kTileBytes) {
      const int64_t bytes = (slice.count - k * kTileDepth) * 2;
      const char* w =
          static_cast<const char*>(p.w) + (tiles.row[i] * p.k + slice.from + k * kTileDepth) * 2;
      for (int64_t row = 0; row < tiles.rows[i]; ++row, w += p.k * 2) {
        if (bytes >= kLine) {
          copy_line(w, to + row * kLine);
        } else {
          __builtin_memset(to + row * kLine, 0, kLine);
          __builtin_memcpy(to + row * kLine, w, size_t(bytes));
        }
      }
    }
}

// Multiplies two tiles of rows of W with one or two panels over `tiles` tiles of depth. kKeep: also
// store the tiles of W to `keep`, contiguously. between() runs after each tile of depth.
template <bool kSecond, bool kKeep, class Work>
void multiply_pair(const TileSource& w, const char* x, ptrdiff_t panel_bytes, int64_t tiles,
                   float* sums, bool first, char* keep, const Work& between) {
  using Block = TileBlock<2, kSecond ? 2 : 1>;
  if (first)
    Block::zero();
  else
    Block::template load<true>(sums, kSumStride);
  const auto store_left = [&](auto tile) __attribute__((always_inline)) {
    if constexpr (kKeep) {
      TileRegisters::store<4 + tile.value>(keep, kLine);
      keep += kTileBytes;
    }
  };
  Block::template multiply_depth<true>(w, {x, kLine, kTileBytes, panel_bytes}, tiles, store_left,
                                       between);
  Block::store(sums, kSumStride);
}

template <class Work>
void multiply_pair(const TileSource& w, const Piece& piece, int64_t pair, const char* x,
                   ptrdiff_t panel_bytes, int64_t tiles, float* sums, bool first, char* keep,
                   const Work& between) {
  x += (piece.panel + 2 * pair) * panel_bytes;
  const bool second = 2 * pair + 1 < piece.panels;
  const auto run = keep
                       ? second ? multiply_pair<true, true, Work> : multiply_pair<false, true, Work>
                   : second ? multiply_pair<true, false, Work>
                            : multiply_pair<false, false, Work>;
  run(w, x, panel_bytes, tiles, sums, first, keep, between);
}

// Returns a piece's rows of W in memory, from tile k of the slice's depth on.
inline TileSource in_memory(const Product& p, const Slice& slice, const Piece& piece, int64_t k) {
  const ptrdiff_t row = p.k * 2;
  return {static_cast<const char*>(p.w) + piece.from * row + slice.from * 2 + k * kLine, row, kLine,
          (p.gated ? p.n / 2 : kAmxRows) * row};
}

// Multiplies few panels. W is read in place over the whole depth, and the rows of the next piece
// are prefetched meanwhile.
inline void gemm_in_place(const Product& p, const Slice& slice, const char* panels,
                          const Piece& piece, float* sums, Store how) {
  const int64_t depth = slice.count / kTileDepth, panel_bytes = depth * kTileBytes;
  const TileSource w = in_memory(p, slice, piece, 0);
  PrefetchRows prefetch(p, slice, piece.next);
  const int64_t pairs = ceil_div(piece.panels, 2),
                lines = ceil_div(prefetch.lines(), depth * pairs);
  for (int64_t pair = 0; pair < pairs; ++pair)
    multiply_pair(w, piece, pair, panels, panel_bytes, depth, sums + pair * kPairFloats, true,
                  nullptr, [&] { prefetch.advance(lines); });
  for (int64_t pair = 0; pair < pairs; ++pair)
    Epilogue(p, piece, 2 * pair, sums + pair * kPairFloats, how).finish();
}

// Multiplies two tiles of rows of W with all panels of a piece. scratch: a chunk of W, then the
// sums. The first pair of panels reads W in place and stores its tiles from registers for the other
// pairs. This costs less than copying them with vectors.
inline void gemm_bf16(const Product& p, const Slice& slice, const char* panels, const Piece& piece,
                      char* scratch) {
  const int64_t depth = ceil_div(slice.count, kTileDepth), panel_bytes = depth * kTileBytes;
  const int64_t pairs = ceil_div(piece.panels, 2);
  const int64_t chunks = ceil_div(depth, kChunkTiles), chunk = ceil_div(depth, chunks);
  auto* const sums = reinterpret_cast<float*>(scratch + kChunkTiles * 2 * kTileBytes);
  const Store how = store_of(p, slice, piece);
  configure(kAmxRows, kAmxRows, kAmxRows);
  const bool full_tiles = piece.to - piece.from == (p.gated ? kAmxRows : kAmxBlockRows) &&
                          slice.count % kTileDepth == 0;
  if (full_tiles && piece.panels <= kMaxInPlacePanels) {
    gemm_in_place(p, slice, panels, piece, sums, how);
    return;
  }
  const TileSource in_scratch{scratch, kLine, 2 * kTileBytes, kTileBytes};
  PrefetchRows prefetch(p, slice, piece.next);
  const int64_t lines = ceil_div(prefetch.lines(), depth * pairs);
  Epilogue epilogue;
  for (int64_t k = 0; k < depth; k += chunk) {
    const int64_t tiles = depth - k < chunk ? depth - k : chunk;
    const bool last = k + chunk >= depth;
    const int64_t quarters = last ? ceil_div(Epilogue::kQuarters, tiles) : 0;
    if (!full_tiles) copy_partial_tiles(p, slice, piece, k, tiles, scratch);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      float* const to = sums + pair * kPairFloats;
      const bool keep = full_tiles && pair == 0;
      const TileSource w = keep ? in_memory(p, slice, piece, k) : in_scratch;
      multiply_pair(w, piece, pair, panels + k * kTileBytes, panel_bytes, tiles, to, k == 0,
                    keep ? scratch : nullptr, [&] {
                      prefetch.advance(lines);
                      epilogue.advance(quarters);
                    });
      if (last) {
        epilogue.finish();
        epilogue = Epilogue(p, piece, 2 * pair, to, how);
      }
    }
  }
  epilogue.finish();
}

inline void pack_bf16(const Product& p, const Slice& slice, char* to, int64_t from, int64_t until) {
  pack_panels_of_tiles<1>(p, slice, to, from, until, pack_rounded_columns);
}

}  // namespace vlora::gemm::VLORA_ISA

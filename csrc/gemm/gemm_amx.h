// Rows of x by a bf16 matrix on a unit that multiplies tiles: W on the left, x on the right, both packed
// tile by tile, since W's own rows lie a power of two apart and would fall on few sets of L1.
#pragma once

#include "gemm/gemm_amx_block.h"

namespace vlora::gemm::VLORA_ISA {

constexpr int64_t kSteps = 20;
// Most tiles of depth at once: two rows of them, 40 KiB of W, stay in L1 while panels stream past.
static_assert(kSteps * 2 * kTileBytes == kTiledScratch * 4);

constexpr int64_t kInPlacePanels = 8;
// Up to so many panels copying W costs more than what its rows' common stride does.

// Tiles [from, from + count) of the depth of a piece's rows of W to scratch, for where rows or depth end
// within one.
inline void copy_ends(const Product& p, const Slice& slice, const Piece& piece, int64_t from, int64_t count,
                      char* to) {
  const TwoTiles tiles(p, piece.from);
  for (int64_t k = from; k < from + count; ++k)
    for (int i = 0; i < 2; ++i, to += kTileBytes) {
      const int64_t there = (slice.count - k * kTileDepth) * 2;
      const char* w = static_cast<const char*>(p.w) + (tiles.row[i] * p.k + slice.from + k * kTileDepth) * 2;
      for (int64_t row = 0; row < tiles.rows[i]; ++row, w += p.k * 2) {
        if (there >= kLine) {
          Beside::copy_line(w, to + row * kLine);
        } else {
          __builtin_memset(to + row * kLine, 0, kLine);
          __builtin_memcpy(to + row * kLine, w, size_t(there));
        }
      }
    }
}

// Where kTileRows rows of W lie: lines of a tile, tiles of depth, and the lower tile are so many bytes apart.
struct Left {
  const char* at;
  ptrdiff_t line, step, lower;
};

// These rows by one or two panels, over `steps` tiles of depth. kKeep: tiles of W go to `keep` as well, one
// behind the other. beside: called at each step.
template <bool kSecond, bool kKeep, class Work>
void block(const Left& left, const char* x, ptrdiff_t panel_bytes, int64_t steps, float* sums, bool first,
           char* keep, const Work& beside) {
  using U = TileRegisters;
  const Sums<kSecond> of{sums};
  of.begin(first);
  const char* w = left.at;
  for (int64_t step = 0; step < steps; ++step, w += left.step, x += kTileBytes) {
    U::load_passing<6>(x, kLine);
    if constexpr (kSecond) U::load_passing<7>(x + panel_bytes, kLine);
    U::load<4>(w, left.line);
    if constexpr (kKeep) U::store<4>(keep, kLine);
    U::multiply<0, 4, 6>();
    if constexpr (kSecond) U::multiply<1, 4, 7>();
    U::load<5>(w + left.lower, left.line);
    if constexpr (kKeep) U::store<5>(keep + kTileBytes, kLine), keep += 2 * kTileBytes;
    U::multiply<2, 5, 6>();
    if constexpr (kSecond) U::multiply<3, 5, 7>();
    beside();
  }
  of.end();
}

template <class Work>
void block(const Left& left, const Piece& piece, int64_t pair, const char* x, ptrdiff_t panel_bytes,
           int64_t steps, float* sums, bool first, char* keep, const Work& beside) {
  x += (piece.panel + 2 * pair) * panel_bytes;
  const bool second = 2 * pair + 1 < piece.panels;
  const auto run = keep ? second ? block<true, true, Work> : block<false, true, Work>
                        : second ? block<true, false, Work> : block<false, false, Work>;
  run(left, x, panel_bytes, steps, sums, first, keep, beside);
}

// A piece's rows of W where they lie, from tile k of the slice's depth on.
inline Left in_memory(const Product& p, const Slice& slice, const Piece& piece, int64_t k) {
  const ptrdiff_t row = p.k * 2;
  return {static_cast<const char*>(p.w) + piece.from * row + slice.from * 2 + k * kLine, row, kLine,
          (p.gated ? p.n / 2 : kTile) * row};
}

// Few panels: W is read where it lies, over the whole depth at once, while the next piece's rows come.
inline void tiled_in_place(const Product& p, const Slice& slice, const char* panels, const Piece& piece,
                           float* sums, Stored how) {
  const int64_t depth = slice.count / kTileDepth, panel_bytes = depth * kTileBytes;
  const Left left = in_memory(p, slice, piece, 0);
  Fetch fetch(p, slice, piece.next);
  const int64_t pairs = ceil_div(piece.panels, 2), lines = ceil_div(fetch.lines(), depth * pairs);
  for (int64_t pair = 0; pair < pairs; ++pair)
    block(left, piece, pair, panels, panel_bytes, depth, sums + pair * kPairFloats, true, nullptr,
          [&] { fetch.some(lines); });
  for (int64_t pair = 0; pair < pairs; ++pair)
    Finish(p, piece, 2 * pair, sums + pair * kPairFloats, how).rest();
}

// Two tiles of W's rows. scratch: a chunk of them, the sums. The first pair of panels reads W where it lies,
// and what it has in registers is stored for the others: that costs less than a copy by vectors.
inline void tiled(const Product& p, const Slice& slice, const char* panels, const Piece& piece,
                  char* scratch) {
  const int64_t depth = ceil_div(slice.count, kTileDepth), panel_bytes = depth * kTileBytes;
  const int64_t pairs = ceil_div(piece.panels, 2);
  const int64_t chunks = ceil_div(depth, kSteps), most = ceil_div(depth, chunks);
  auto* const sums = reinterpret_cast<float*>(scratch + kSteps * 2 * kTileBytes);
  const Stored how = stored(p, slice, piece);
  configure(kTile, kTile, kTile);
  const bool whole = piece.to - piece.from == (p.gated ? kTile : kTileRows) && slice.count % kTileDepth == 0;
  if (whole && piece.panels <= kInPlacePanels) {
    tiled_in_place(p, slice, panels, piece, sums, how);
    return;
  }
  const Left kept{scratch, kLine, 2 * kTileBytes, kTileBytes};
  Fetch fetch(p, slice, piece.next);
  const int64_t lines = ceil_div(fetch.lines(), depth * pairs);
  Finish finish;
  for (int64_t k = 0; k < depth; k += most) {
    const int64_t steps = depth - k < most ? depth - k : most;
    const bool last = k + most >= depth;
    const int64_t quarters = last ? ceil_div(Finish::kQuarters, steps) : 0;
    if (!whole) copy_ends(p, slice, piece, k, steps, scratch);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      float* const to = sums + pair * kPairFloats;
      const bool keep = whole && pair == 0;
      const Left left = keep ? in_memory(p, slice, piece, k) : kept;
      block(left, piece, pair, panels + k * kTileBytes, panel_bytes, steps, to, k == 0, keep ? scratch : nullptr,
            [&] {
              fetch.some(lines);
              finish.some(quarters);
            });
      if (last) {
        finish.rest();
        finish = Finish(p, piece, 2 * pair, to, how);
      }
    }
  }
  finish.rest();
}

// Panels [from, until) of x, each of whole tiles: zeros where its rows or its depth end.
inline void pack_tiles(const Product& p, const Slice& slice, char* to, int64_t from, int64_t until) {
  const int64_t depth = ceil_div(slice.count, kTileDepth);
  to += from * depth * kTileBytes;
  for (int64_t panel = from; panel < until; ++panel)
    for (int64_t k = 0; k < depth; ++k, to += kTileBytes) {
      const int64_t t = panel * kTile, rows = p.rows - t, there = slice.count - k * kTileDepth;
      Beside::pack(p.x + t * p.x_stride + slice.from + k * kTileDepth, p.x_stride,
                   int(rows < kTile ? rows : kTile), int(there < kTileDepth ? there : kTileDepth), to);
    }
}

}  // namespace vlora::gemm::VLORA_ISA

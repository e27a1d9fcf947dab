// Rows of x by a matrix of fp32 on a unit that multiplies tiles of bf16. A value is exactly the sum of three of
// bf16, its limbs: eight bits of it, the eight below, the last eight. Of the nine products of two values'
// limbs the six largest are summed, in fp32: what is left out is below 2^-21 of a product, and 2^-23 on average,
// as much as rounding a sum of fp32 loses.
#pragma once

#include "gemm/gemm_amx_block.h"

namespace vlora::gemm::VLORA_ISA {

constexpr int kLimbs = runtime::kLimbs;
constexpr int64_t kStepBytes = kLimbs * 2 * kTileBytes;  // limbs of two tiles of W
constexpr int64_t kLimbSteps = 5;
// Most tiles of depth at once: 30 KiB of W stay in L1 while panels stream past.
constexpr int64_t kSplitRows = 8;  // at once: a tile's within the six products of a step
static_assert(kLimbSteps * kStepBytes <= kTiledScratch * 4);

// Rows of W of some tiles of depth to scratch, in limbs, a few between the products.
class Split {
 public:
  Split() = default;
  // Tiles [from, from + steps) of the depth of a piece's rows.
  Split(const Product& p, const Slice& slice, const Piece& piece, int64_t from, int64_t steps, char* to)
      : stride_(p.k), depth_(slice.count - from * kTileDepth), steps_(steps), to_(to) {
    const TwoTiles tiles(p, piece.from);
    for (int i = 0; i < 2; ++i) {
      w_[i] = static_cast<const float*>(p.w) + tiles.row[i] * p.k + slice.from + from * kTileDepth;
      rows_[i] = tiles.rows[i];
    }
  }

  // kSplitRows more of the tiles before `until`.
  VLORA_INLINE void some(int64_t until) {
    if (step_ >= until || !left()) return;
    const int64_t tile = at_ / kTile, row = at_ % kTile;
    const float* w = w_[tile] + row * stride_;
    char* to = to_ + tile * kTileBytes + row * kLine;
    if (depth_ >= kTileDepth && row + kSplitRows <= rows_[tile]) {
#pragma GCC unroll 8
      for (int i = 0; i < kSplitRows; ++i, w += stride_) Beside::split(w, to + i * kLine, 2 * kTileBytes);
    } else {
      for (int i = 0; i < kSplitRows && row + i < rows_[tile]; ++i, w += stride_)
        Beside::split_part(w, int(depth_), to + i * kLine, 2 * kTileBytes);
    }
    if ((at_ += kSplitRows) < kTileRows) return;
    at_ = 0, ++step_;
    depth_ -= kTileDepth;
    to_ += kStepBytes;
    for (int i = 0; i < 2; ++i) w_[i] += kTileDepth;
  }
  bool left() const { return step_ < steps_; }
  void rest() {
    while (left()) some(steps_);
  }

 private:
  const float* w_[2] = {};
  int64_t rows_[2] = {}, stride_ = 0, depth_ = 0, steps_ = 0, step_ = 0, at_ = 0;
  char* to_ = nullptr;
};

// Two tiles of W's rows by one or two panels, over `steps` tiles of depth. beside(step): called six times at
// each. The order of the limbs is such that those of x are read once.
template <bool kSecond, class Work>
void limbs_block(const char* w, const char* x, ptrdiff_t panel_bytes, int64_t steps, float* sums, bool first,
                  const Work& beside) {
  using U = TileRegisters;
  const Sums<kSecond> of{sums};
  of.begin(first);
  for (int64_t step = 0; step < steps; ++step, w += kStepBytes, x += kLimbs * kTileBytes) {
    const auto left = [&](int limb) {
      U::load<4>(w + limb * 2 * kTileBytes, kLine);
      U::load<5>(w + limb * 2 * kTileBytes + kTileBytes, kLine);
    };
    const auto right = [&](int limb) {
      U::load_passing<6>(x + limb * kTileBytes, kLine);
      if constexpr (kSecond) U::load_passing<7>(x + limb * kTileBytes + panel_bytes, kLine);
    };
    const auto multiply = [&] {
      U::multiply<0, 4, 6>();
      if constexpr (kSecond) U::multiply<1, 4, 7>();
      U::multiply<2, 5, 6>();
      if constexpr (kSecond) U::multiply<3, 5, 7>();
      beside(step);
    };
    left(0), right(2), multiply();
    right(1), multiply();
    left(1), multiply();
    right(0), multiply();
    left(0), multiply();
    left(2), multiply();
  }
  of.end();
}

// Two tiles of W's rows. scratch: limbs of a chunk of them, the sums. While the last pair of panels is multiplied
// the next chunk takes its place, a tile behind, and its last tile while the next chunk's first is.
inline void tiled_limbs(const Product& p, const Slice& slice, const char* panels, const Piece& piece,
                         char* scratch) {
  const int64_t depth = ceil_div(slice.count, kTileDepth), panel_bytes = depth * kLimbs * kTileBytes;
  const int64_t pairs = ceil_div(piece.panels, 2);
  const int64_t chunks = ceil_div(depth, kLimbSteps), most = ceil_div(depth, chunks);
  auto* const sums = reinterpret_cast<float*>(scratch + kTiledScratch * 4);
  configure(kTile, kTile, kTile);
  Fetch fetch(p, slice, piece.next);
  const int64_t lines = ceil_div(fetch.lines(), depth * pairs * 6);
  const Stored how = stored(p, slice, piece);
  Finish finish;
  Split now(p, slice, piece, 0, most, scratch);
  now.rest();
  for (int64_t k = 0; k < depth; k += most) {
    const int64_t steps = depth - k < most ? depth - k : most, after = depth - k - steps;
    const bool last = after == 0;
    const int64_t quarters = last ? ceil_div(Finish::kQuarters, steps * 6) : 0;
    Split next(p, slice, piece, k + steps, after < most ? after : most, scratch);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const char* const x = panels + (piece.panel + 2 * pair) * panel_bytes + k * kLimbs * kTileBytes;
      float* const to = sums + pair * kPairFloats;
      Results results;
      if (last && how != Stored::kPastCaches) results = Results(p, piece, 2 * pair);
      const bool replace = pair + 1 == pairs;
      const auto beside = [&](int64_t step) {
        fetch.some(lines);
        finish.some(quarters);
        results.fetch(2 * quarters);
        if (now.left()) {
          now.some(most);
        } else if (replace) {
          next.some(step);
        }
      };
      if (2 * pair + 1 < piece.panels) {
        limbs_block<true>(scratch, x, panel_bytes, steps, to, k == 0, beside);
      } else {
        limbs_block<false>(scratch, x, panel_bytes, steps, to, k == 0, beside);
      }
      if (last) {
        finish.rest();
        finish = Finish(p, piece, 2 * pair, to, how);
      }
    }
    now = next;
    if (after < most) now.rest();  // which may be needed at once
  }
  finish.rest();
}

// Panels [from, until) of x: for each tile of depth its limbs, zeros where rows or depth end.
inline void pack_limbs(const Product& p, const Slice& slice, char* to, int64_t from, int64_t until) {
  const int64_t depth = ceil_div(slice.count, kTileDepth);
  to += from * depth * kLimbs * kTileBytes;
  for (int64_t panel = from; panel < until; ++panel)
    for (int64_t k = 0; k < depth; ++k, to += kLimbs * kTileBytes) {
      const int64_t t = panel * kTile, rows = p.rows - t, there = slice.count - k * kTileDepth;
      Beside::pack_limbs(p.x + t * p.x_stride + slice.from + k * kTileDepth, p.x_stride,
                          int(rows < kTile ? rows : kTile), int(there < kTileDepth ? there : kTileDepth), to);
    }
}

}  // namespace vlora::gemm::VLORA_ISA

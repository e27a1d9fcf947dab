// Rows of x by a bf16 matrix on a unit that multiplies tiles: W on the left, x on the right, both packed
// tile by tile, since W's own rows lie a power of two apart and would fall on few sets of L1.
#pragma once

#include "cpu/tile_product.h"
#include "linear/linear.h"

namespace vlora::linear::VLORA_ISA {

using cpu::kTile;
using cpu::kTileRows;
using namespace vlora::cpu::VLORA_ISA;

constexpr int64_t kLine = 64, kTileBytes = kTile * kLine;
constexpr int64_t kTileFloats = kTile * kTile;
constexpr int64_t kTileDepth = 2 * kTile;  // values of a row in a line
constexpr int64_t kSteps = 20;
// Most tiles of depth at once: two rows of them, 40 KiB of W, stay in L1 while panels stream past.

// Rows of W that come next, copied to tiles line by line between the products of those that are there.
class Copy {
 public:
  // ahead: lines from what is fetched to what is copied.
  Copy(const Product& p, int64_t from, int64_t until, char* to, int64_t ahead)
      : row_bytes_(p.k * 2), lines_(ceil_div(p.k, kTileDepth)), count_((until - from) * lines_), ahead_(ahead),
        from_(static_cast<const char*>(p.w) + from * row_bytes_), to_(to) {}

  int64_t lines() const { return count_ + ahead_; }

  void some(int64_t lines) {
    for (; lines > 0 && at_ < count_ + ahead_; --lines, ++at_) {
      if (at_ < count_) __builtin_prefetch(from_ + at_ * kLine, 0, 2);
      if (at_ >= ahead_) copy();
    }
  }
  void rest() { some(lines()); }

 private:
  void copy() {
    const char* const from = from_ + row_ * row_bytes_ + column_ * kLine;
    char* const to = to_ + (2 * column_ + row_ / kTile) * kTileBytes + row_ % kTile * kLine;
    const int64_t there = row_bytes_ - column_ * kLine;
    if (there >= kLine) {
      Beside::copy_line(from, to);
    } else {  // the depth ends within a tile
      __builtin_memset(to, 0, kLine);
      __builtin_memcpy(to, from, size_t(there));
    }
    if (++column_ == lines_) column_ = 0, ++row_;
  }

  const int64_t row_bytes_, lines_, count_, ahead_;
  const char* const from_;
  char* const to_;
  int64_t at_ = 0, row_ = 0, column_ = 0;
};

// Sums of two panels to y, four rows of x by a tile's columns at a time.
class Finish {
 public:
  Finish() = default;
  Finish(const Product& p, const Piece& piece, int64_t panel, const float* sums)
      : p_(&p), sums_(sums), row_(piece.from), rows_(piece.to - piece.from),
        t_((piece.panel + panel) * kTile), count_(panel + 1 < piece.panels ? kQuarters : kQuarters / 2) {}

  void some(int64_t quarters) {
    for (; quarters > 0 && at_ < count_; --quarters, ++at_) {
      const int64_t second = at_ / 8, lower = at_ / 4 % 2, quarter = at_ % 4;
      const int64_t t = t_ + second * kTile + quarter * 4, n = row_ + lower * kTile;
      const int64_t rows = p_->rows - t, columns = rows_ - lower * kTile;
      if (rows <= 0 || columns <= 0) continue;
      Beside::store_turned(sums_ + (2 * lower + second) * kTileFloats, int(quarter),
                           p_->y + t * p_->y_stride + n, p_->y_stride, int(rows < 4 ? rows : 4),
                           int(columns < kTile ? columns : kTile), p_->bias ? p_->bias + n : nullptr);
    }
  }
  void rest() { some(kQuarters); }

  static constexpr int64_t kQuarters = 16;

 private:
  const Product* p_ = nullptr;
  const float* sums_ = nullptr;
  int64_t row_ = 0, rows_ = 0, t_ = 0, count_ = 0, at_ = 0;
};

// Two tiles of W's rows by one or two panels, over `steps` tiles of depth. beside: called at each step.
template <bool kSecond, class Work>
void block(const char* w, const char* x, ptrdiff_t panel_bytes, int64_t steps, float* sums, bool first,
           const Work& beside) {
  using U = TileRegisters;
  const auto begin = [&](auto tile) {
    if (first)
      U::zero<tile.value>();
    else
      U::load_passing<tile.value>(sums + tile.value * kTileFloats, kLine);
  };
  begin(At<0>{});
  begin(At<2>{});
  if constexpr (kSecond) begin(At<1>{}), begin(At<3>{});
  for (; steps > 0; --steps, w += 2 * kTileBytes, x += kTileBytes) {
    U::load_passing<6>(x, kLine);
    if constexpr (kSecond) U::load_passing<7>(x + panel_bytes, kLine);
    U::load<4>(w, kLine);
    U::multiply<0, 4, 6>();
    if constexpr (kSecond) U::multiply<1, 4, 7>();
    U::load<5>(w + kTileBytes, kLine);
    U::multiply<2, 5, 6>();
    if constexpr (kSecond) U::multiply<3, 5, 7>();
    beside();
  }
  U::store<0>(sums, kLine);
  U::store<2>(sums + 2 * kTileFloats, kLine);
  if constexpr (kSecond) {
    U::store<1>(sums + kTileFloats, kLine);
    U::store<3>(sums + 3 * kTileFloats, kLine);
  }
}

// At most kTileRows rows of W. scratch: two copies of them, the sums.
inline void tiled(const Product& p, const char* panels, const Piece& piece, char* scratch) {
  const int64_t depth = ceil_div(p.k, kTileDepth), panel_bytes = depth * kTileBytes;
  const int64_t copy_bytes = 2 * depth * kTileBytes;
  char* const w = scratch + piece.turn % 2 * copy_bytes;
  auto* const sums = reinterpret_cast<float*>(scratch + 2 * copy_bytes);
  if (piece.turn == 0) Copy(p, piece.from, piece.to, w, 64).rest();
  const int64_t next = piece.next < 0 ? p.n : piece.next;
  const int64_t pairs = ceil_div(piece.panels, 2);
  Copy copy(p, next, next + kTileRows < p.n ? next + kTileRows : p.n, scratch + (piece.turn + 1) % 2 * copy_bytes,
            next < p.n ? 8 * depth : 0);
  const int64_t each = ceil_div(copy.lines(), depth * pairs);
  configure(kTile, kTile, kTile);
  const int64_t chunks = ceil_div(depth, kSteps), most = ceil_div(depth, chunks);
  Finish finish;
  for (int64_t k = 0; k < depth; k += most) {
    const int64_t steps = depth - k < most ? depth - k : most;
    const bool last = k + most >= depth;
    const int64_t quarters = ceil_div(Finish::kQuarters, steps);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      float* const to = sums + pair * 4 * kTileFloats;
      const char* const x = panels + (piece.panel + 2 * pair) * panel_bytes + k * kTileBytes;
      const auto beside = [&] {
        copy.some(each);
        if (last) finish.some(quarters);
      };
      if (2 * pair + 1 < piece.panels) {
        block<true>(w + 2 * k * kTileBytes, x, panel_bytes, steps, to, k == 0, beside);
      } else {
        block<false>(w + 2 * k * kTileBytes, x, panel_bytes, steps, to, k == 0, beside);
      }
      if (last) finish = Finish(p, piece, 2 * pair, to);
    }
  }
  copy.rest();
  finish.rest();
}

// Panels [from, until) of x, each of whole tiles: zeros where its rows or its depth end.
inline void pack_tiles(const Product& p, char* to, int64_t from, int64_t until) {
  const int64_t depth = ceil_div(p.k, kTileDepth);
  to += from * depth * kTileBytes;
  for (int64_t panel = from; panel < until; ++panel)
    for (int64_t k = 0; k < depth; ++k, to += kTileBytes) {
      const int64_t t = panel * kTile, rows = p.rows - t, there = p.k - k * kTileDepth;
      Beside::pack(p.x + t * p.x_stride + k * kTileDepth, p.x_stride, int(rows < kTile ? rows : kTile),
                   int(there < kTileDepth ? there : kTileDepth), to);
    }
}

}  // namespace vlora::linear::VLORA_ISA

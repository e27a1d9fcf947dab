// Rows of x by a bf16 matrix on a unit that multiplies tiles: W on the left, x on the right, both packed
// tile by tile, since W's own rows lie a power of two apart and would fall on few sets of L1.
#pragma once

#include "cpu/tile_product.h"
#include "linear/gated.h"
#include "linear/linear.h"

namespace vlora::linear::VLORA_ISA {

using cpu::kTile;
using cpu::kTileRows;
using cpu::Stored;
using namespace vlora::cpu::VLORA_ISA;

constexpr int64_t kLine = 64, kTileBytes = kTile * kLine;
constexpr int64_t kSumLine = 2 * kTile, kPairFloats = kTileRows * kSumLine;  // sums of a pair of panels
constexpr int64_t kTileDepth = 2 * kTile;  // values of a row in a line
constexpr int64_t kSteps = 20;
// Most tiles of depth at once: two rows of them, 40 KiB of W, stay in L1 while panels stream past.
static_assert(kSteps * 2 * kTileBytes == kTiledScratch * 4);

constexpr int64_t kInPlacePanels = 8;
// Up to so many panels copying W costs more than what its rows' common stride does.

// The rows of W of a piece's two tiles: neighbours, or gates and what they are for.
struct TwoTiles {
  int64_t row[2], rows[2];

  // from: the piece's first row, or -1 for none.
  TwoTiles(const Product& p, int64_t from) : row{from, p.gated ? p.n / 2 + from : from + kTile} {
    const int64_t ends[2] = {p.gated ? p.n / 2 : p.n, p.n};
    for (int i = 0; i < 2; ++i) {
      const int64_t left = from < 0 ? 0 : ends[i] - row[i];
      rows[i] = left < 0 ? 0 : left < kTile ? left : kTile;
    }
  }
};

// A piece's rows of W, some tiles of depth of them at a time in scratch.
class Copy {
 public:
  Copy(const Product& p, const Slice& slice, int64_t from, char* to)
      : tiles_(p, from), stride_(p.k * 2), row_bytes_(slice.count * 2),
        w_(static_cast<const char*>(p.w) + slice.from * 2), to_(to) {}

  // Tile k of the slice's depth, as the given one in scratch.
  void tile(int64_t k, int64_t as) const {
    const int64_t there = row_bytes_ - k * kLine;
    for (int i = 0; i < 2; ++i) {
      const char* from = w_ + tiles_.row[i] * stride_ + k * kLine;
      char* to = to_ + (2 * as + i) * kTileBytes;
      for (int64_t row = 0; row < tiles_.rows[i]; ++row, from += stride_, to += kLine) {
        if (there >= kLine) {
          Beside::copy_line(from, to);
        } else {  // the depth ends within a tile
          __builtin_memset(to, 0, kLine);
          __builtin_memcpy(to, from, size_t(there));
        }
      }
    }
  }

 private:
  const TwoTiles tiles_;
  const int64_t stride_, row_bytes_;
  const char* const w_;
  char* const to_;
};

// The rows of W that come next, brought to L2 row by row between the products.
class Fetch {
 public:
  Fetch(const Product& p, const Slice& slice, int64_t from)
      : tiles_(p, from), stride_(p.k * 2), lines_(ceil_div(slice.count * 2, kLine)),
        w_(static_cast<const char*>(p.w) + slice.from * 2),
        count_(lines_ * (tiles_.rows[0] + tiles_.rows[1])), line_(w_ + tiles_.row[0] * stride_) {}
  int64_t lines() const { return count_; }
  void some(int64_t lines) {
    for (; lines > 0 && count_ > 0; --lines, --count_, line_ += kLine) {
      __builtin_prefetch(line_, 0, 2);
      if (++at_ < lines_) continue;
      at_ = 0;
      const bool lower = ++row_ >= tiles_.rows[0];
      line_ = w_ + (lower ? tiles_.row[1] + row_ - tiles_.rows[0] : tiles_.row[0] + row_) * stride_ - kLine;
    }
  }

 private:
  const TwoTiles tiles_;
  const int64_t stride_, lines_;
  const char* const w_;
  int64_t count_, at_ = 0, row_ = 0;
  const char* line_;
};

// Sums of two panels to y, four rows of x by a tile's columns at a time.
class Finish {
 public:
  Finish() = default;
  Finish(const Product& p, const Piece& piece, int64_t panel, float* sums, Stored how)
      : p_(&p), sums_(sums), how_(how), row_(piece.from), rows_(piece.to - piece.from),
        t_((piece.panel + panel) * kTile), count_(panel + 1 < piece.panels ? kQuarters : kQuarters / 2) {}

  void some(int64_t quarters) {
    for (; quarters > 0 && at_ < count_; --quarters, ++at_) {
      if (p_->gated) {
        gated_quarter();
        continue;
      }
      const int64_t second = at_ / 8, quarter = at_ / 2 % 4, lower = at_ % 2;  // neighbours in y together
      const int64_t t = t_ + second * kTile + quarter * 4, n = row_ + lower * kTile;
      const int64_t rows = p_->rows - t, columns = rows_ - lower * kTile;
      if (rows <= 0 || columns <= 0) continue;
      Beside::store_turned(sums_ + lower * kTile * kSumLine + second * kTile, kSumLine, int(quarter),
                           p_->y + t * p_->y_stride + n, p_->y_stride, int(rows < 4 ? rows : 4),
                           int(columns < kTile ? columns : kTile), p_->bias ? p_->bias + n : nullptr, how_);
    }
  }
  void rest() { some(kQuarters); }

  static constexpr int64_t kQuarters = 16;

 private:
  // Of each panel first the gates, four of W's rows at a time, then what they leave, four rows of x.
  void gated_quarter() const {
    const int64_t second = at_ / 8, quarter = at_ % 4, t = t_ + second * kTile + quarter * 4;
    float* const gates = sums_ + second * kTile;
    if (at_ / 4 % 2 == 0) {
      for (int64_t n = 4 * quarter; n < 4 * quarter + 4 && n < rows_; ++n) {
        const float* const biases = p_->bias ? p_->bias + row_ + n : nullptr;
        gate_line(gates + n * kSumLine, gates + (kTile + n) * kSumLine, biases ? biases[0] : 0,
                  biases ? biases[p_->n / 2] : 0);
      }
    } else if (const int64_t rows = p_->rows - t; rows > 0) {
      Beside::store_turned(gates, kSumLine, int(quarter), p_->y + t * p_->y_stride + row_, p_->y_stride,
                           int(rows < 4 ? rows : 4), int(rows_), nullptr, how_);
    }
  }

  static void gate_line(float* gates, const float* ups, float gate_bias, float up_bias) {
    for (int i = 0; i < kTile; i += R::kWidth)
      gated(R::load(gates + i) + R::all(gate_bias), R::load(ups + i) + R::all(up_bias)).store(gates + i);
  }

  const Product* p_ = nullptr;
  float* sums_ = nullptr;
  Stored how_ = Stored::kPlain;
  int64_t row_ = 0, rows_ = 0, t_ = 0, count_ = 0, at_ = 0;
};

// Where kTileRows rows of W lie: lines of a tile, tiles of depth, and the lower tile are so many bytes apart.
struct Left {
  const char* at;
  ptrdiff_t line, step, lower;
};

// These rows by one or two panels, over `steps` tiles of depth. beside: called at each step, with its number.
template <bool kSecond, class Work>
void block(const Left& left, const char* x, ptrdiff_t panel_bytes, int64_t steps, float* sums, bool first,
           const Work& beside) {
  using U = TileRegisters;
  const auto sums_of = [&](int tile) { return sums + tile / 2 * kTile * kSumLine + tile % 2 * kTile; };
  const auto begin = [&](auto tile) {
    if (first)
      U::zero<tile.value>();
    else
      U::load_passing<tile.value>(sums_of(tile.value), kSumLine * 4);
  };
  begin(At<0>{});
  begin(At<2>{});
  if constexpr (kSecond) begin(At<1>{}), begin(At<3>{});
  const char* w = left.at;
  for (int64_t step = 0; step < steps; ++step, w += left.step, x += kTileBytes) {
    U::load_passing<6>(x, kLine);
    if constexpr (kSecond) U::load_passing<7>(x + panel_bytes, kLine);
    U::load<4>(w, left.line);
    U::multiply<0, 4, 6>();
    if constexpr (kSecond) U::multiply<1, 4, 7>();
    U::load<5>(w + left.lower, left.line);
    U::multiply<2, 5, 6>();
    if constexpr (kSecond) U::multiply<3, 5, 7>();
    beside(step);
  }
  U::store<0>(sums_of(0), kSumLine * 4);
  U::store<2>(sums_of(2), kSumLine * 4);
  if constexpr (kSecond) {
    U::store<1>(sums_of(1), kSumLine * 4);
    U::store<3>(sums_of(3), kSumLine * 4);
  }
}

template <class Work>
void block(const Left& left, const Piece& piece, int64_t pair, const char* x, ptrdiff_t panel_bytes,
           int64_t steps, float* sums, bool first, const Work& beside) {
  x += (piece.panel + 2 * pair) * panel_bytes;
  if (2 * pair + 1 < piece.panels) {
    block<true>(left, x, panel_bytes, steps, sums, first, beside);
  } else {
    block<false>(left, x, panel_bytes, steps, sums, first, beside);
  }
}

// Few panels: W is read where it lies, over the whole depth at once, while the next piece's rows come.
inline void tiled_in_place(const Product& p, const Slice& slice, const char* panels, const Piece& piece,
                           float* sums, Stored how) {
  const int64_t depth = slice.count / kTileDepth, panel_bytes = depth * kTileBytes, row = p.k * 2;
  const auto* const w = static_cast<const char*>(p.w) + piece.from * row + slice.from * 2;
  const ptrdiff_t lower = (p.gated ? p.n / 2 : kTile) * row;
  Fetch fetch(p, slice, piece.next);
  const int64_t pairs = ceil_div(piece.panels, 2), lines = ceil_div(fetch.lines(), depth * pairs);
  for (int64_t pair = 0; pair < pairs; ++pair)
    block({w, row, kLine, lower}, piece, pair, panels, panel_bytes, depth, sums + pair * kPairFloats, true,
          [&](int64_t) { fetch.some(lines); });
  for (int64_t pair = 0; pair < pairs; ++pair)
    Finish(p, piece, 2 * pair, sums + pair * kPairFloats, how).rest();
}

// Two tiles of W's rows. scratch: a chunk of them, the sums. Where a pair of panels has used a tile of
// W for the last time, the one that takes its place follows: of the next chunk, or of the next piece.
inline void tiled(const Product& p, const Slice& slice, const char* panels, const Piece& piece,
                  char* scratch) {
  const int64_t depth = ceil_div(slice.count, kTileDepth), panel_bytes = depth * kTileBytes;
  const int64_t pairs = ceil_div(piece.panels, 2);
  const int64_t chunks = ceil_div(depth, kSteps), most = ceil_div(depth, chunks);
  auto* const sums = reinterpret_cast<float*>(scratch + kSteps * 2 * kTileBytes);
  const bool aligned = reinterpret_cast<uintptr_t>(p.y) % kLine == 0 && p.y_stride % kTile == 0;
  const Stored how = slice.from > 0                  ? Stored::kAdded
                     : piece.past_caches && aligned ? Stored::kPastCaches
                                                    : Stored::kPlain;
  configure(kTile, kTile, kTile);
  const bool few = piece.panels <= kInPlacePanels;
  if (few && piece.to - piece.from == (p.gated ? kTile : kTileRows) && slice.count % kTileDepth == 0) {
    tiled_in_place(p, slice, panels, piece, sums, how);
    return;
  }
  const Copy here(p, slice, piece.from, scratch), there(p, slice, piece.next, scratch);
  if (piece.first || few)  // the piece before has left no copy
    for (int64_t step = 0; step < most; ++step) here.tile(step, step);
  Fetch fetch(p, slice, piece.next);
  // All of it is there when the last panels make room for the next piece.
  const int64_t before = depth * pairs - most;
  const int64_t lines = ceil_div(fetch.lines(), before > 0 ? before : most);
  Finish finish;
  for (int64_t k = 0; k < depth; k += most) {
    const int64_t steps = depth - k < most ? depth - k : most;
    const bool last = k + most >= depth;
    const int64_t quarters = last ? ceil_div(Finish::kQuarters, steps) : 0;
    // What follows may have more tiles than there are here.
    const Copy& following = last ? there : here;
    const int64_t from = last ? 0 : k + most, until = last ? most : depth - from < most ? depth - from : most;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      float* const to = sums + pair * kPairFloats;
      const bool makes_room = pair + 1 == pairs;
      const auto beside = [&](int64_t step) {
        if (makes_room && step < until) following.tile(from + step, step);
        fetch.some(lines);
        finish.some(quarters);
      };
      block({scratch, kLine, 2 * kTileBytes, kTileBytes}, piece, pair, panels + k * kTileBytes, panel_bytes,
            steps, to, k == 0, beside);
      if (last) {
        finish.rest();
        finish = Finish(p, piece, 2 * pair, to, how);
      }
    }
    for (int64_t step = steps; step < until; ++step) following.tile(from + step, step);
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

}  // namespace vlora::linear::VLORA_ISA

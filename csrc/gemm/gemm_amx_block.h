// What a piece of a product by tiles has beside its products: which rows of W are its two tiles, those of the
// piece after it fetched, sums turned to y.
#pragma once

#include "runtime/tile_product.h"
#include "gemm/gated.h"
#include "gemm/gemm.h"

namespace vlora::gemm::VLORA_ISA {

using runtime::kTile;
using runtime::kTileRows;
using runtime::Stored;
using namespace vlora::runtime::VLORA_ISA;

constexpr int64_t kLine = 64, kTileBytes = kTile * kLine;
constexpr int64_t kSumLine = 2 * kTile, kPairFloats = kTileRows * kSumLine;  // sums of a pair of panels
constexpr int64_t kTileDepth = 2 * kTile;  // values of a row in a line of bf16

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

// The sums of two tiles of W's rows by one panel or two: registers 0 … 3, which lie side by side in memory.
template <bool kSecond>
struct Sums {
  float* at;

  // From zero, or from what is there.
  VLORA_INLINE void begin(bool zero) const {
    each([&](auto tile) {
      if (zero)
        TileRegisters::zero<tile.value>();
      else
        TileRegisters::load_passing<tile.value>(of(tile.value), kSumLine * 4);
    });
  }
  VLORA_INLINE void end() const {
    each([&](auto tile) { TileRegisters::store<tile.value>(of(tile.value), kSumLine * 4); });
  }

 private:
  float* of(int tile) const { return at + tile / 2 * kTile * kSumLine + tile % 2 * kTile; }
  template <class Do>
  VLORA_INLINE static void each(const Do& one) {
    one(At<0>{}), one(At<2>{});
    if constexpr (kSecond) one(At<1>{}), one(At<3>{});
  }
};

// The rows of W that come next, brought to L2 row by row between the products.
class Fetch {
 public:
  Fetch(const Product& p, const Slice& slice, int64_t from)
      : tiles_(p, from), stride_(p.k * int64_t(size_of(p.dtype))),
        lines_(ceil_div(slice.count * int64_t(size_of(p.dtype)), kLine)),
        w_(static_cast<const char*>(p.w) + slice.from * int64_t(size_of(p.dtype))),
        count_(lines_ * (tiles_.rows[0] + tiles_.rows[1])), line_(w_ + tiles_.row[0] * stride_) {}
  int64_t lines() const { return count_; }
  VLORA_INLINE void some(int64_t lines) {
    while (lines > 0 && count_ > 0) {
      const int64_t left = lines_ - at_, now = lines < left ? lines : left;
      for (const char* const end = line_ + now * kLine; line_ < end; line_ += kLine) __builtin_prefetch(line_, 0, 2);
      lines -= now, count_ -= now;
      if ((at_ += now) < lines_) return;
      at_ = 0;
      const bool lower = ++row_ >= tiles_.rows[0];
      line_ = w_ + (lower ? tiles_.row[1] + row_ - tiles_.rows[0] : tiles_.row[0] + row_) * stride_;
    }
  }

 private:
  const TwoTiles tiles_;
  const int64_t stride_, lines_;
  const char* const w_;
  int64_t count_, at_ = 0, row_ = 0;
  const char* line_;
};

inline Stored stored(const Product& p, const Slice& slice, const Piece& piece) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.y) % kLine == 0 && p.y_stride % kTile == 0;
  return slice.from > 0 ? Stored::kAdded : piece.past_caches && aligned ? Stored::kPastCaches : Stored::kPlain;
}

// Rows of y that the sums of two panels are about to be added to, in a piece's columns: brought to L2.
class Results {
 public:
  Results() = default;
  Results(const Product& p, const Piece& piece, int64_t panel) : stride_(p.y_stride) {
    const int64_t t = (piece.panel + panel) * kTile, left = p.rows - t;
    y_ = p.y + t * stride_ + piece.from;
    rows_ = left < 2 * kTile ? left : 2 * kTile;
  }
  VLORA_INLINE void fetch(int64_t rows) {
    for (; rows > 0 && rows_ > 0; --rows, --rows_, y_ += stride_)
      __builtin_prefetch(y_, 1, 2), __builtin_prefetch(y_ + kTile, 1, 2);
  }

 private:
  const float* y_ = nullptr;
  int64_t stride_ = 0, rows_ = 0;
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

}  // namespace vlora::gemm::VLORA_ISA

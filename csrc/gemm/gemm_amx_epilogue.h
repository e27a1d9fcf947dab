// The work of a piece of a gemm on tiles besides its products: finding its rows of W, prefetching W
// and y, and writing the sums to y. These steps run in small portions between the products.
#pragma once

#include "gemm/gated.h"
#include "gemm/gemm.h"
#include "runtime/fp32_limbs.h"
#include "runtime/tile_product.h"

namespace vlora::gemm::VLORA_ISA {

using runtime::kAmxBlockRows;
using runtime::kAmxRows;
using runtime::Store;
using namespace vlora::runtime::VLORA_ISA;

// Bytes of a cache line (also of a line of a tile), and bytes of a tile.
constexpr int64_t kLine = 64, kTileBytes = kAmxRows * kLine;
// Number of values of a row in a tile of bf16.
constexpr int64_t kTileDepth = 2 * kAmxRows;
// Sums of a pair of panels: floats per row, and in total.
constexpr int64_t kSumStride = 2 * kAmxRows, kPairFloats = kAmxBlockRows * kSumStride;

// The rows of W in the two tiles of a piece. They are adjacent or, for a gated product, gates and
// the ups that they multiply.
struct TileRows {
  int64_t row[2], rows[2];

  // from: first row of the piece, or -1 for no rows.
  TileRows(const Product& p, int64_t from) : row{from, p.gated ? p.n / 2 + from : from + kAmxRows} {
    const int64_t ends[2] = {p.gated ? p.n / 2 : p.n, p.n};
    for (int i = 0; i < 2; ++i) {
      const int64_t left = from < 0 ? 0 : ends[i] - row[i];
      rows[i] = left < 0 ? 0 : left < kAmxRows ? left : kAmxRows;
    }
  }
};

// Prefetches the rows of W of the next piece to L2, row by row.
class PrefetchRows {
 public:
  PrefetchRows(const Product& p, const Slice& slice, int64_t from)
      : tiles_(p, from),
        stride_(p.k * int64_t(size_of(p.dtype))),
        row_lines_(ceil_div(slice.count * int64_t(size_of(p.dtype)), kLine)),
        w_(static_cast<const char*>(p.w) + slice.from * int64_t(size_of(p.dtype))),
        left_(row_lines_ * (tiles_.rows[0] + tiles_.rows[1])),
        line_(w_ + tiles_.row[0] * stride_) {}
  // Returns the number of cache lines to prefetch.
  int64_t lines() const { return left_; }
  VLORA_INLINE void advance(int64_t lines) {
    while (lines > 0 && left_ > 0) {
      const int64_t in_row = row_lines_ - done_in_row_, now = lines < in_row ? lines : in_row;
      for (const char* const end = line_ + now * kLine; line_ < end; line_ += kLine)
        __builtin_prefetch(line_, 0, 2);
      lines -= now, left_ -= now;
      if ((done_in_row_ += now) < row_lines_) return;
      done_in_row_ = 0;
      const bool lower = ++row_ >= tiles_.rows[0];
      line_ = w_ + (lower ? tiles_.row[1] + row_ - tiles_.rows[0] : tiles_.row[0] + row_) * stride_;
    }
  }

 private:
  const TileRows tiles_;
  const int64_t stride_, row_lines_;
  const char* const w_;
  int64_t left_, done_in_row_ = 0, row_ = 0;
  const char* line_;
};

inline Store store_of(const Product& p, const Slice& slice, const Piece& piece) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.y) % kLine == 0 && p.y_stride % kAmxRows == 0;
  return slice.from > 0               ? Store::kAdd
         : piece.streaming && aligned ? Store::kStream
                                      : Store::kOverwrite;
}

// Prefetches the rows of y, in the columns of a piece, to which the sums of two panels will be
// written.
class PrefetchResults {
 public:
  PrefetchResults() = default;
  PrefetchResults(const Product& p, const Piece& piece, int64_t panel) : stride_(p.y_stride) {
    const int64_t t = (piece.panel + panel) * kAmxRows, left = p.rows - t;
    y_ = p.y + t * stride_ + piece.from;
    rows_ = left < 2 * kAmxRows ? left : 2 * kAmxRows;
  }
  VLORA_INLINE void advance(int64_t rows) {
    for (; rows > 0 && rows_ > 0; --rows, --rows_, y_ += stride_)
      __builtin_prefetch(y_, 1, 2), __builtin_prefetch(y_ + kAmxRows, 1, 2);
  }

 private:
  const float* y_ = nullptr;
  int64_t stride_ = 0, rows_ = 0;
};

// Writes the sums of two panels to y, a quarter of a tile at a time: four rows of x by the columns
// of a tile.
class Epilogue {
 public:
  // Number of quarters in the four tiles of a pair of panels.
  static constexpr int64_t kQuarters = 16;

  Epilogue() = default;
  Epilogue(const Product& p, const Piece& piece, int64_t panel, float* sums, Store how)
      : p_(&p),
        sums_(sums),
        how_(how),
        row_(piece.from),
        rows_(piece.to - piece.from),
        t_((piece.panel + panel) * kAmxRows),
        count_(panel + 1 < piece.panels ? kQuarters : kQuarters / 2) {}

  void advance(int64_t quarters) {
    for (; quarters > 0 && next_ < count_; --quarters, ++next_) {
      if (p_->gated) {
        gated_quarter();
        continue;
      }
      // The two tiles of W are neighbours in y, so quarters of both are written alternately.
      const int64_t second = next_ / 8, quarter = next_ / 2 % 4, lower = next_ % 2;
      const int64_t t = t_ + second * kAmxRows + quarter * 4, n = row_ + lower * kAmxRows;
      const int64_t rows = p_->rows - t, columns = rows_ - lower * kAmxRows;
      if (rows <= 0 || columns <= 0) continue;
      store_transposed(sums_ + lower * kAmxRows * kSumStride + second * kAmxRows, kSumStride,
                       int(quarter), p_->y + t * p_->y_stride + n, p_->y_stride,
                       int(rows < 4 ? rows : 4), int(columns < kAmxRows ? columns : kAmxRows),
                       p_->bias ? p_->bias + n : nullptr, how_);
    }
  }
  void finish() { advance(kQuarters); }

 private:
  // For each panel, the first four quarters apply the gate in place, to four rows of W each. The
  // next four write four rows of x each.
  void gated_quarter() const {
    const int64_t second = next_ / 8, quarter = next_ % 4, t = t_ + second * kAmxRows + quarter * 4;
    float* const gates = sums_ + second * kAmxRows;
    if (next_ / 4 % 2 == 0) {
      for (int64_t n = 4 * quarter; n < 4 * quarter + 4 && n < rows_; ++n) {
        const float* const biases = p_->bias ? p_->bias + row_ + n : nullptr;
        gate_line(gates + n * kSumStride, gates + (kAmxRows + n) * kSumStride,
                  biases ? biases[0] : 0, biases ? biases[p_->n / 2] : 0);
      }
    } else if (const int64_t rows = p_->rows - t; rows > 0) {
      store_transposed(gates, kSumStride, int(quarter), p_->y + t * p_->y_stride + row_,
                       p_->y_stride, int(rows < 4 ? rows : 4), int(rows_), nullptr, how_);
    }
  }

  static void gate_line(float* gates, const float* ups, float gate_bias, float up_bias) {
    for (int i = 0; i < kAmxRows; i += R::kWidth)
      gated(R::load(gates + i) + R::all(gate_bias), R::load(ups + i) + R::all(up_bias))
          .store(gates + i);
  }

  const Product* p_ = nullptr;
  float* sums_ = nullptr;
  Store how_ = Store::kOverwrite;
  int64_t row_ = 0, rows_ = 0, t_ = 0, count_ = 0, next_ = 0;
};

// Packs panels [from, until) of x with kCount tiles per tile of depth, which
// pack(x, stride, rows, count, to) makes. Missing rows and depths are zero.
template <int kCount, class Pack>
inline void pack_panels_of_tiles(const Product& p, const Slice& slice, char* to, int64_t from,
                                 int64_t until, const Pack& pack) {
  const int64_t depth = ceil_div(slice.count, kTileDepth);
  to += from * depth * kCount * kTileBytes;
  for (int64_t panel = from; panel < until; ++panel)
    for (int64_t k = 0; k < depth; ++k, to += kCount * kTileBytes) {
      const int64_t t = panel * kAmxRows, rows = p.rows - t, left = slice.count - k * kTileDepth;
      pack(p.x + t * p.x_stride + slice.from + k * kTileDepth, p.x_stride,
           int(rows < kAmxRows ? rows : kAmxRows), int(left < kTileDepth ? left : kTileDepth), to);
    }
}

}  // namespace vlora::gemm::VLORA_ISA

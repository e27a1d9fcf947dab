// Gemm on vectors: values of W are broadcast against panels of 16 rows of x, block by block.
#pragma once

#include "gemm/gemm_vector_tile.h"

namespace vlora::gemm::VLORA_ISA {

// A part of the depth of a piece's rows of W, and its copy in scratch memory.
template <class P>
struct Block {
  const typename P::Stored* w;
  int64_t depth;  // 0 if nothing is to be copied
  float* copy;
};

// Panels of a piece that a tile multiplies together.
struct PanelGroup {
  int64_t first, count;
  int64_t of;  // number of panels in the piece
};

// Multiplies the rows of a block, read in place, with N panels, M rows in a tile. Each tile
// prefetches its own rows of the next block, in the share of their depth that belongs to this group
// of panels. Memory is thus read steadily instead of in bursts.
template <class P, int M, int N>
void multiply_in_place(const Product& p, int64_t rows, const Block<P>& now, const Block<P>& next,
                       const PanelGroup& group, const typename P::X* panel, float* c, bool first,
                       PrefetchResults* results) {
  constexpr int64_t kLine = 64 / int64_t(sizeof(typename P::Stored));
  const int64_t lines = now.depth / kLine;
  const int64_t from = lines * group.first / group.of * kLine;
  const int64_t end = lines * (group.first + group.count) / group.of * kLine;
  const typename P::W* w = now.w;
  int64_t n = 0;
  for (; n + M <= rows; n += M, w += M * p.k, c += M * kLanes)
    gemm_tile<P, M, N, LookaheadKind::kPrefetch>(
        w, p.k, panel, x_register_stride<P>(p.k), now.depth, c, first,
        {next.w + n * p.k + from, nullptr, nullptr, p.k, end - from, results});
  for (; n < rows; ++n, w += p.k, c += kLanes)
    gemm_tile<P, 1, N, LookaheadKind::kNone>(w, p.k, panel, x_register_stride<P>(p.k), now.depth, c,
                                             first, {});
}

// Multiplies the rows of a block with N registers of x, M rows in a tile. For the first panels of a
// block, `next` is the block that follows. Each tile then also copies the rows of the next tile
// (kCopied), and prefetches those of the tile after the next. For other panels `next` is null.
template <class P, int M, int N, bool kCopied>
void multiply_block(const Product& p, int64_t rows, const Block<P>& now, const Block<P>* next,
                    const typename P::X* panel, float* c, bool first) {
  const typename P::W* w;
  if constexpr (kCopied) {
    w = now.copy;
  } else {
    w = now.w;
  }
  const ptrdiff_t stride = kCopied ? kCopyStride<P> : p.k;
  const ptrdiff_t register_stride = x_register_stride<P>(p.k);
  int64_t n = 0;
  for (; n + M <= rows; n += M, w += M * stride, c += M * kLanes) {
    if (!next) {
      gemm_tile<P, M, N, LookaheadKind::kNone>(w, stride, panel, register_stride, now.depth, c,
                                               first, {});
      continue;
    }
    // The next tile is copied, and the tile after it is prefetched. Each may belong to the next
    // block.
    const bool copy_here = n + 2 * M <= rows, prefetch_here = n + 3 * M <= rows;
    Lookahead<P> lookahead{
        prefetch_here ? now.w + (n + 2 * M) * p.k : next->w + (copy_here ? 0 : M) * p.k, nullptr,
        nullptr, p.k, now.depth};
    const Block<P>& block = copy_here ? now : *next;
    if (!kCopied || !block.depth) {
      gemm_tile<P, M, N, LookaheadKind::kPrefetch>(w, stride, panel, register_stride, now.depth, c,
                                                   first, lookahead);
      continue;
    }
    const int64_t row = copy_here ? n + M : 0;
    lookahead.from = block.w + row * p.k;
    lookahead.to = block.copy + row * kCopyStride<P>;
    constexpr int kLine = 64 / int(sizeof(typename P::Stored));
    lookahead.columns = (block.depth < now.depth ? block.depth : now.depth) / kLine * kLine;
    if constexpr (kCopied) {
      gemm_tile<P, M, N, LookaheadKind::kPrefetchAndCopy>(w, stride, panel, register_stride,
                                                          now.depth, c, first, lookahead);
      copy_rows<P>(lookahead.from, p.k, M, lookahead.columns, block.depth, lookahead.to);
    }
  }
  if constexpr (kCopied) {
    if (next && n < rows) {
      copy_rows<P>(now.w + n * p.k, p.k, rows - n, 0, now.depth, now.copy + n * kCopyStride<P>);
      if (next->copy) copy_rows<P>(next->w, p.k, rows < M ? rows : M, 0, next->depth, next->copy);
    }
  }
  for (; n < rows; ++n, w += stride, c += kLanes)
    gemm_tile<P, 1, N, LookaheadKind::kNone>(w, stride, panel, register_stride, now.depth, c, first,
                                             {});
}

// Writes the sums of a group of panels to y in full lines, if a register holds a line.
template <class Register>
void store_lines(const Product& p, const Piece& piece, const PanelGroup& group, const float* c) {
  const int64_t rows = piece.to - piece.from;
  for (int64_t panel = group.first; panel < group.first + group.count;
       ++panel, c += kBlockRows * kLanes)
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int64_t t = (piece.panel + panel) * kLanes + 4 * quarter;
      const int64_t count = p.rows - t < 4 ? p.rows - t : 4;
      for (int64_t n = 0; n < rows; n += kLanes) {
        Register lines[4];
        Register::transpose(c + n * kLanes, kLanes, quarter, lines);
        const Register bias = p.bias ? Register::load(p.bias + piece.from + n) : Register::zero();
        for (int64_t i = 0; i < count; ++i)
          (lines[i] + bias).store(p.y + (t + i) * p.y_stride + piece.from + n);
      }
    }
}

// Writes the sums of a piece, [panel][row of W][row of x], to y in blocks of 4 x 4.
inline void store_sums(const Product& p, const Piece& piece, const float* c) {
  const int64_t rows = piece.to - piece.from;
  for (int64_t panel = 0; panel < piece.panels; ++panel, c += kBlockRows * kLanes) {
    const int64_t t0 = (piece.panel + panel) * kLanes;
    const int64_t count = p.rows - t0 < kLanes ? p.rows - t0 : kLanes;
    float* y = p.y + t0 * p.y_stride + piece.from;
    const float* bias = p.bias ? p.bias + piece.from : nullptr;
    int64_t t = 0;
    for (; t + 4 <= count; t += 4)
      for (int64_t n = 0; n < rows; n += 4) {
        float* to = y + t * p.y_stride + n;
        if (n + 4 <= rows) {
          Quad s[4];
          for (int i = 0; i < 4; ++i) s[i] = Quad::load(c + (n + i) * kLanes + t);
          Quad::transpose(s);
          for (int i = 0; i < 4; ++i) {
            if (bias) s[i] = s[i] + Quad::load(bias + n);
            s[i].store(to + i * p.y_stride);
          }
        } else {
          for (int i = 0; i < 4; ++i)
            for (int64_t j = n; j < rows; ++j)
              to[i * p.y_stride + j - n] = c[j * kLanes + t + i] + (bias ? bias[j] : 0);
        }
      }
    for (; t < count; ++t)
      for (int64_t n = 0; n < rows; ++n)
        y[t * p.y_stride + n] = c[n * kLanes + t] + (bias ? bias[n] : 0);
  }
}

template <int N>
using Count = std::integral_constant<int, N>;

// Multiplies a piece. kCopied: each block of W is copied to scratch while the block before it is
// multiplied.
template <class P, bool kCopied>
void gemm_by_vectors(const Product& p, const float* packed, const Piece& piece, float* scratch) {
  static_assert(kBlockRows * kCopyStride<P> <= kCopyFloats, "a block's copy must fit");
  const auto* const values = reinterpret_cast<const typename P::X*>(packed);
  const auto* const w = static_cast<const typename P::Stored*>(p.w) + piece.from * p.k;
  const int64_t rows = piece.to - piece.from;
  float* const sums = scratch + 2 * kCopyFloats;
  // Returns the number of registers of x that are multiplied by W together, from this panel on.
  auto registers_at = [&](int64_t panel) {
    if (kFullLines)
      return int(piece.panels - panel < kPanelsAtOnce ? piece.panels - panel : kPanelsAtOnce);
    return p.rows - (piece.panel + panel) * kLanes <= R::kWidth ? 1 : int(kLanes / R::kWidth);
  };
  auto block_at = [&](int64_t k) {
    const int64_t depth = p.k - k < P::kDepth ? p.k - k : P::kDepth;
    return Block<P>{w + k, depth, scratch + k / P::kDepth % 2 * kCopyFloats};
  };
  Block<P> now = block_at(0);
  if constexpr (kCopied) {  // the rows of the first tile
    const int64_t tile_rows = kAccumulators / registers_at(0);
    copy_rows<P>(now.w, p.k, rows < tile_rows ? rows : tile_rows, 0, now.depth, now.copy);
  }
  for (int64_t k = 0; k < p.k; k += P::kDepth) {
    const bool last = k + P::kDepth >= p.k;
    // After the last block, the rows of the next piece are prefetched but not copied.
    const int64_t other = piece.next < 0 ? 0 : piece.next - piece.from;
    const Block<P> next = last ? Block<P>{w + other * p.k, 0, nullptr} : block_at(k + P::kDepth);
    for (int64_t panel = 0, count; panel < piece.panels; panel += count) {
      const typename P::X* const x = values + ((piece.panel + panel) * p.k + k) * kLanes;
      float* const c = sums + panel * kBlockRows * kLanes;
      const Block<P>* const prepared = panel == 0 ? &next : nullptr;
      const int n = registers_at(panel);
      count = kFullLines ? n : 1;
      const auto multiply = [&](auto registers, PrefetchResults* results) {
        constexpr int N = decltype(registers)::value;
        const auto by_tiles_of = [&](auto tile_rows) {
          constexpr int M = decltype(tile_rows)::value;
          if constexpr (kFullLines && !kCopied) {
            multiply_in_place<P, M, N>(p, rows, now, next, {panel, count, piece.panels}, x, c,
                                       k == 0, results);
          } else {
            multiply_block<P, M, N, kCopied>(p, rows, now, prepared, x, c, k == 0);
          }
        };
        if constexpr (kCopied) {
          by_tiles_of(Count<kAccumulators / N>{});
        } else {
          constexpr int kTall = in_place_tile_rows(kAccumulators, N, kTallTile);
          const bool tall = in_place_tile_rows(kAccumulators, N, piece.rows_in_l1) == kTall;
          tall ? by_tiles_of(Count<kTall>{}) : by_tiles_of(Count<kShortTile>{});
        }
      };
      if constexpr (kFullLines) {
        const int64_t t = (piece.panel + panel) * kLanes, left = p.rows - t;
        PrefetchResults results{p.y + t * p.y_stride + piece.from, p.y_stride,
                                left < count * kLanes ? left : count * kLanes};
        PrefetchResults* const prefetched = last ? &results : nullptr;
        if (n == 1) multiply(Count<1>{}, prefetched);
        if (n == 2) multiply(Count<2>{}, prefetched);
        if (n == 3) multiply(Count<3>{}, prefetched);
        if (n == 4) multiply(Count<4>{}, prefetched);
        if (last && rows % kLanes == 0) store_lines<R>(p, piece, {panel, count, piece.panels}, c);
      } else if (n == 1) {
        multiply(Count<1>{}, nullptr);
      } else {
        multiply(Count<kLanes / R::kWidth>{}, nullptr);
      }
    }
    now = next;
  }
  if (!kFullLines || rows % kLanes != 0) store_sums(p, piece, sums);
}

// Packs panels of fp32 if a register holds a line, 16 rows by 16 values at a time. The rows of x
// may be a power of two apart, so they are read once, line by line, and transposed from a copy.
template <class Register>
void pack_lines(const Product& p, float* to, int64_t from, int64_t until) {
  alignas(64) float lines[kLanes * kLanes] = {};
  for (int64_t panel = from; panel < until; ++panel) {
    const int64_t t = panel * kLanes, rows = p.rows - t < kLanes ? p.rows - t : kLanes;
    const float* const x = p.x + t * p.x_stride;
    float* out = to + t * p.k;
    for (int64_t i = rows; i < kLanes; ++i) Register::zero().store(lines + i * kLanes);
    for (int64_t k = 0; k < p.k; k += kLanes) {
      const int64_t columns = p.k - k < kLanes ? p.k - k : kLanes;
      for (int64_t i = 0; i < rows; ++i) {
        if (columns == kLanes) {
          Register::load(x + i * p.x_stride + k).store(lines + i * kLanes);
        } else {
          __builtin_memcpy(lines + i * kLanes, x + i * p.x_stride + k,
                           size_t(columns) * sizeof(float));
        }
      }
      for (int64_t quarter = 0; 4 * quarter < columns; ++quarter) {
        Register transposed[4];
        Register::transpose(lines, kLanes, int(quarter), transposed);
        for (int64_t i = 0; i < 4 && 4 * quarter + i < columns; ++i, out += kLanes)
          transposed[i].store(out);
      }
    }
  }
}

// Packs panels [from, until) of x: 16 rows interleaved value by value or, in bf16, pair by pair.
// Missing rows are zero.
template <class P>
void pack_panels(const Product& p, float* to, int64_t from, int64_t until) {
  if constexpr (kFullLines && P::kUnits == 1) return pack_lines<R>(p, to, from, until);
  for (int64_t panel = from; panel < until; ++panel)
    for (int64_t quad = 0; quad < kLanes; quad += 4) {
      static const float zeros[4] = {};
      const float* x[4];
      bool exists[4];
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t t = panel * kLanes + quad + i;
        exists[i] = t < p.rows;
        x[i] = exists[i] ? p.x + t * p.x_stride : zeros;
      }
      if constexpr (P::kUnits == 2) {
        auto* out = reinterpret_cast<uint16_t*>(to) + panel * kLanes * p.k;
        for (int64_t i = 0; i < 4; ++i)
          for (int64_t k = 0; k < p.k; k += R::kWidth) {
            float values[R::kWidth] = {};
            uint16_t rounded[R::kWidth];
            const int64_t count = p.k - k < R::kWidth ? p.k - k : R::kWidth;
            for (int64_t j = 0; exists[i] && j < count; ++j) values[j] = x[i][k + j];
            R::load(values).store(rounded);
            for (int64_t j = 0; j < count; j += 2)
              __builtin_memcpy(out + (k + j) * kLanes + (quad + i) * 2, rounded + j, 4);
          }
      } else {
        float* out = to + panel * kLanes * p.k + quad;
        int64_t k = 0;
        for (; k + 4 <= p.k; k += 4) {
          Quad v[4];
          for (int i = 0; i < 4; ++i) v[i] = Quad::load(exists[i] ? x[i] + k : zeros);
          Quad::transpose(v);
          for (int i = 0; i < 4; ++i) v[i].store(out + (k + i) * kLanes);
        }
        for (; k < p.k; ++k)
          for (int i = 0; i < 4; ++i) out[k * kLanes + i] = exists[i] ? x[i][k] : 0;
      }
    }
}

}  // namespace vlora::gemm::VLORA_ISA

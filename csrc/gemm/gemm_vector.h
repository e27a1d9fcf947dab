// Many rows: values of W are broadcast against panels of 16 rows of x, block by block.
#pragma once

#include "gemm/gemm_vector_tile.h"

namespace vlora::gemm::VLORA_ISA {

// Some depth of a piece's rows of W, and the copy of them.
template <class P>
struct Block {
  const typename P::Stored* w;
  int64_t depth;  // 0: nothing of it is to be copied
  float* copy;
};

// Panels that are met at once: the first one, how many, of all panels of a piece.
struct Group {
  int64_t panel, panels, all;
};

// The rows of a block, in place, with N panels. Each tile fetches its own rows of the block that follows: of
// their depth the share of this group of panels, so that memory is asked all the time and not in bursts.
template <class P, int N>
void panels_block(const Product& p, int64_t rows, const Block<P>& now, const Block<P>& next, const Group& group,
                  const typename P::X* panel, float* c, bool first, Results* results) {
  constexpr int M = kAccumulators / N;
  constexpr int64_t kLine = 64 / int64_t(sizeof(typename P::Stored));
  const int64_t lines = now.depth / kLine, until = group.panel + group.panels;
  const int64_t from = lines * group.panel / group.all * kLine, end = lines * until / group.all * kLine;
  const typename P::W* w = now.w;
  int64_t n = 0;
  for (; n + M <= rows; n += M, w += M * p.k, c += M * kLanes)
    panel_tile<P, M, N, Also::kFetch>(w, p.k, panel, apart<P>(p.k), now.depth, c, first,
                                      {next.w + n * p.k + from, nullptr, nullptr, p.k, end - from, results});
  for (; n < rows; ++n, w += p.k, c += kLanes)
    panel_tile<P, 1, N, Also::kNothing>(w, p.k, panel, apart<P>(p.k), now.depth, c, first, {});
}

// The rows of a block with N registers of one panel, or with N panels. While `next` is there, that is for a
// block's first panels, each tile sees to those that follow it: in this block, then in the next one.
template <class P, int N, bool kCopied>
void panel_block(const Product& p, int64_t rows, const Block<P>& now, const Block<P>* next,
                 const typename P::X* panel, float* c, bool first) {
  constexpr int M = kAccumulators / N;
  const typename P::W* w;
  if constexpr (kCopied) {
    w = now.copy;
  } else {
    w = now.w;
  }
  const ptrdiff_t stride = kCopied ? kCopyStride<P> : p.k;
  int64_t n = 0;
  for (; n + M <= rows; n += M, w += M * stride, c += M * kLanes) {
    if (!next) {
      panel_tile<P, M, N, Also::kNothing>(w, stride, panel, apart<P>(p.k), now.depth, c, first, {});
      continue;
    }
    const bool here = n + 2 * M <= rows;  // the tile after this one, and the one after that
    Beside<P> beside{n + 3 * M <= rows ? now.w + (n + 2 * M) * p.k : next->w + (here ? 0 : M) * p.k,
                     nullptr, nullptr, p.k, now.depth};
    const Block<P>& block = here ? now : *next;
    if (!kCopied || !block.depth) {
      panel_tile<P, M, N, Also::kFetch>(w, stride, panel, apart<P>(p.k), now.depth, c, first, beside);
      continue;
    }
    const int64_t row = here ? n + M : 0;
    beside.from = block.w + row * p.k;
    beside.to = block.copy + row * kCopyStride<P>;
    constexpr int kLine = 64 / int(sizeof(typename P::Stored));
    beside.columns = (block.depth < now.depth ? block.depth : now.depth) / kLine * kLine;
    if constexpr (kCopied) {
      panel_tile<P, M, N, Also::kFetchAndCopy>(w, stride, panel, apart<P>(p.k), now.depth, c, first, beside);
      copy_rows<P>(beside.from, p.k, M, beside.columns, block.depth, beside.to);
    }
  }
  if constexpr (kCopied) {
    if (next && n < rows) {
      copy_rows<P>(now.w + n * p.k, p.k, rows - n, 0, now.depth, now.copy + n * kCopyStride<P>);
      if (next->copy) copy_rows<P>(next->w, p.k, rows < M ? rows : M, 0, next->depth, next->copy);
    }
  }
  for (; n < rows; ++n, w += stride, c += kLanes)
    panel_tile<P, 1, N, Also::kNothing>(w, stride, panel, apart<P>(p.k), now.depth, c, first, {});
}

// The sums of some panels to y where a register holds a line: whole lines of y.
template <class V>
void store_lines(const Product& p, const Piece& piece, const Group& group, const float* c) {
  const int64_t rows = piece.to - piece.from;
  for (int64_t panel = group.panel; panel < group.panel + group.panels; ++panel, c += kBlock * kLanes)
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int64_t t = (piece.panel + panel) * kLanes + 4 * quarter;
      const int64_t count = p.rows - t < 4 ? p.rows - t : 4;
      for (int64_t n = 0; n < rows; n += kLanes) {
        V columns[4];
        V::turned(c + n * kLanes, kLanes, quarter, columns);
        const V bias = p.bias ? V::load(p.bias + piece.from + n) : V::zero();
        for (int64_t i = 0; i < count; ++i)
          (columns[i] + bias).store(p.y + (t + i) * p.y_stride + piece.from + n);
      }
    }
}

// The sums of a piece, [panel][row of W][row of x] with these strides, to y.
inline void store_sums(const Product& p, const Piece& piece, const float* c, ptrdiff_t row_stride,
                       ptrdiff_t panel_stride) {
  const int64_t rows = piece.to - piece.from;
  for (int64_t panel = 0; panel < piece.panels; ++panel, c += panel_stride) {
    const int64_t t0 = (piece.panel + panel) * kLanes;
    const int64_t count = p.rows - t0 < kLanes ? p.rows - t0 : kLanes;
    float* y = p.y + t0 * p.y_stride + piece.from;
    const float* bias = p.bias ? p.bias + piece.from : nullptr;
    int64_t t = 0;
    for (; t + 4 <= count; t += 4)
      for (int64_t n = 0; n < rows; n += 4) {
        float* to = y + t * p.y_stride + n;
        if (n + 4 <= rows) {
          __m128 s[4];
          for (int i = 0; i < 4; ++i) s[i] = _mm_loadu_ps(c + (n + i) * row_stride + t);
          _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
          for (int i = 0; i < 4; ++i) {
            if (bias) s[i] = _mm_add_ps(s[i], _mm_loadu_ps(bias + n));
            _mm_storeu_ps(to + i * p.y_stride, s[i]);
          }
        } else {
          for (int i = 0; i < 4; ++i)
            for (int64_t j = n; j < rows; ++j)
              to[i * p.y_stride + j - n] = c[j * row_stride + t + i] + (bias ? bias[j] : 0);
        }
      }
    for (; t < count; ++t)
      for (int64_t n = 0; n < rows; ++n)
        y[t * p.y_stride + n] = c[n * row_stride + t] + (bias ? bias[n] : 0);
  }
}

template <int N>
using Registers = std::integral_constant<int, N>;

template <class P, bool kCopied>
void many(const Product& p, const float* packed, const Piece& piece, float* scratch) {
  static_assert(kBlock * kCopyStride<P> <= kCopyFloats, "a block's copy must fit");
  const auto* const values = reinterpret_cast<const typename P::X*>(packed);
  const auto* const all = static_cast<const typename P::Stored*>(p.w) + piece.from * p.k;
  const int64_t rows = piece.to - piece.from;
  float* const sums = scratch + 2 * kCopyFloats;
  // Registers of x that meet W at once, from this panel on.
  auto registers = [&](int64_t panel) {
    if (kWholeLines) return int(piece.panels - panel < kPanelsAtOnce ? piece.panels - panel : kPanelsAtOnce);
    return p.rows - (piece.panel + panel) * kLanes <= R::kWidth ? 1 : int(kLanes / R::kWidth);
  };
  auto block_at = [&](int64_t k) {
    const int64_t depth = p.k - k < P::kDepth ? p.k - k : P::kDepth;
    return Block<P>{all + k, depth, scratch + k / P::kDepth % 2 * kCopyFloats};
  };
  Block<P> now = block_at(0);
  if constexpr (kCopied) {  // the first tile's rows
    const int64_t most = kAccumulators / registers(0);
    copy_rows<P>(now.w, p.k, rows < most ? rows : most, 0, now.depth, now.copy);
  }
  for (int64_t k = 0; k < p.k; k += P::kDepth) {
    const bool last = k + P::kDepth >= p.k;
    const int64_t other = piece.next < 0 ? 0 : piece.next - piece.from;  // a piece that is only fetched
    const Block<P> next = last ? Block<P>{all + other * p.k, 0, nullptr} : block_at(k + P::kDepth);
    for (int64_t panel = 0, count; panel < piece.panels; panel += count) {
      const typename P::X* const x = values + ((piece.panel + panel) * p.k + k) * kLanes;
      float* const c = sums + panel * kBlock * kLanes;
      const Block<P>* const after = panel == 0 ? &next : nullptr;
      const int n = registers(panel);
      count = kWholeLines ? n : 1;
      const auto multiply = [&](auto registers, Results* results) {
        constexpr int N = decltype(registers)::value;
        if constexpr (kWholeLines && !kCopied) {
          panels_block<P, N>(p, rows, now, next, {panel, count, piece.panels}, x, c, k == 0, results);
        } else {
          panel_block<P, N, kCopied>(p, rows, now, after, x, c, k == 0);
        }
      };
      if constexpr (kWholeLines) {
        const int64_t t = (piece.panel + panel) * kLanes, there = p.rows - t;
        Results results{p.y + t * p.y_stride + piece.from, p.y_stride,
                        there < count * kLanes ? there : count * kLanes};
        Results* const fetched = last ? &results : nullptr;
        if (n == 1) multiply(Registers<1>{}, fetched);
        if (n == 2) multiply(Registers<2>{}, fetched);
        if (n == 3) multiply(Registers<3>{}, fetched);
        if (n == 4) multiply(Registers<4>{}, fetched);
        if (last && rows % kLanes == 0) store_lines<R>(p, piece, {panel, count, piece.panels}, c);
      } else if (n == 1) {
        multiply(Registers<1>{}, nullptr);
      } else {
        multiply(Registers<kLanes / R::kWidth>{}, nullptr);
      }
    }
    now = next;
  }
  if (!kWholeLines || rows % kLanes != 0) store_sums(p, piece, sums, kLanes, kBlock * kLanes);
}

// Panels of fp32 where a register holds a line: 16 rows by 16 values at a time. Their rows may lie a power of
// two apart, so they are read once, line by line, and turned from a copy.
template <class V>
void pack_lines(const Product& p, float* to, int64_t from, int64_t until) {
  alignas(64) float lines[kLanes * kLanes] = {};
  for (int64_t panel = from; panel < until; ++panel) {
    const int64_t t = panel * kLanes, rows = p.rows - t < kLanes ? p.rows - t : kLanes;
    const float* const x = p.x + t * p.x_stride;
    float* out = to + t * p.k;
    for (int64_t i = rows; i < kLanes; ++i) V::zero().store(lines + i * kLanes);
    for (int64_t k = 0; k < p.k; k += kLanes) {
      const int64_t columns = p.k - k < kLanes ? p.k - k : kLanes;
      for (int64_t i = 0; i < rows; ++i) {
        if (columns == kLanes) {
          V::load(x + i * p.x_stride + k).store(lines + i * kLanes);
        } else {
          __builtin_memcpy(lines + i * kLanes, x + i * p.x_stride + k, size_t(columns) * sizeof(float));
        }
      }
      for (int64_t quarter = 0; 4 * quarter < columns; ++quarter) {
        V turned[4];
        V::turned(lines, kLanes, int(quarter), turned);
        for (int64_t i = 0; i < 4 && 4 * quarter + i < columns; ++i, out += kLanes) turned[i].store(out);
      }
    }
  }
}

// Panels [from, until) of x: 16 rows (zeros where there are fewer) side by side, value by value, or
// pair of bf16 by pair.
template <class P>
void pack_many(const Product& p, float* to, int64_t from, int64_t until) {
  if constexpr (kWholeLines && P::kUnits == 1) return pack_lines<R>(p, to, from, until);
  for (int64_t panel = from; panel < until; ++panel)
    for (int64_t quad = 0; quad < kLanes; quad += 4) {
      static const float zeros[4] = {};
      const float* x[4];
      bool there[4];
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t t = panel * kLanes + quad + i;
        there[i] = t < p.rows;
        x[i] = there[i] ? p.x + t * p.x_stride : zeros;
      }
      if constexpr (P::kUnits == 2) {
        auto* out = reinterpret_cast<uint16_t*>(to) + panel * kLanes * p.k;
        for (int64_t i = 0; i < 4; ++i)
          for (int64_t k = 0; k < p.k; k += R::kWidth) {
            float values[R::kWidth] = {};
            uint16_t rounded[R::kWidth];
            const int64_t count = p.k - k < R::kWidth ? p.k - k : R::kWidth;
            for (int64_t j = 0; there[i] && j < count; ++j) values[j] = x[i][k + j];
            R::load(values).store(rounded);
            for (int64_t j = 0; j < count; j += 2)
              __builtin_memcpy(out + (k + j) * kLanes + (quad + i) * 2, rounded + j, 4);
          }
      } else {
        float* out = to + panel * kLanes * p.k + quad;
        int64_t k = 0;
        for (; k + 4 <= p.k; k += 4) {
          __m128 v[4];
          for (int i = 0; i < 4; ++i) v[i] = _mm_loadu_ps(there[i] ? x[i] + k : zeros);
          _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
          for (int i = 0; i < 4; ++i) _mm_storeu_ps(out + (k + i) * kLanes, v[i]);
        }
        for (; k < p.k; ++k)
          for (int i = 0; i < 4; ++i) out[k * kLanes + i] = there[i] ? x[i][k] : 0;
      }
    }
}

}  // namespace vlora::gemm::VLORA_ISA

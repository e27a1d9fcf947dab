// Gemv: a few rows of x with W. A group of rows of W is multiplied at a time; each lane sums a part
// of the depth.
#pragma once

#include "gemm/gemm.h"

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Rows of W that are done before the next ones are read.
constexpr int kGroup = 4;
// Maximum number of rows of x in a register tile.
constexpr int kGemvRows = 6;
// Rows of W in a tile with four or more rows of x: the accumulators fill the registers.
constexpr int kTallTileRows = R::kWidth == 16 ? 4 : 2;
// Bytes that a single row of W is prefetched ahead.
constexpr ptrdiff_t kPrefetchBytes = 2048;

// The ways to multiply. W and X are the types of the factors in memory, kStep the values of depth
// in a step. group(rows) is the number of rows of W in a tile with this many rows of x.

// Both factors are fp32; x is read in place.
struct Fp32Gemv {
  using W = float;
  using X = float;
  static constexpr int kStep = R::kWidth;
  static constexpr bool kInPlace = true;
  static constexpr int group(int rows) { return rows <= 3 ? kGroup : kTallTileRows; }
  template <int N, int T>
  static VLORA_INLINE void step(R (&acc)[N][T], const W* const (&w)[N], const X* x,
                                ptrdiff_t stride) {
    R xs[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) xs[t] = R::load(x + t * stride);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const R b = R::load(w[n]);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[n][t].add_product(b, xs[t]);
    }
  }
};

// W is bf16, widened in registers. In each step the values with even indices are multiplied first,
// then those with odd ones; x is packed in that order.
struct WidenedGemv {
  using W = uint16_t;
  using X = float;
  static constexpr int kStep = 2 * R::kWidth;
  static constexpr bool kInPlace = false;
  static constexpr int group(int rows) {
    return rows <= 2 ? 1 : rows == 3 ? kGroup : kTallTileRows;
  }
  template <int N, int T>
  static VLORA_INLINE void step(R (&acc)[N][T], const W* const (&w)[N], const X* x,
                                ptrdiff_t stride) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      R xs[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) xs[t] = R::load(x + t * stride + odd * R::kWidth);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const R b = odd ? R::odd(w[n]) : R::even(w[n]);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) acc[n][t].add_product(b, xs[t]);
      }
    }
  }
  static void pack(const float* x, int64_t count, X* to) {
    for (int64_t k = 0; k < count; k += kStep, to += kStep)
      for (int i = 0; i < R::kWidth; ++i)
        for (int odd = 0; odd < 2; ++odd) {
          const int64_t index = k + 2 * i + odd;
          to[odd * R::kWidth + i] = index < count ? x[index] : 0;
        }
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
// Both factors are pairs of bf16; x is rounded.
struct PairsGemv {
  using W = uint16_t;
  using X = uint16_t;
  static constexpr int kStep = 2 * R::kWidth;
  static constexpr bool kInPlace = false;
  static constexpr int group(int rows) {
    return rows <= 2 ? 1 : rows == 3 ? kGroup : kTallTileRows;
  }
  template <int N, int T>
  static VLORA_INLINE void step(R (&acc)[N][T], const W* const (&w)[N], const X* x,
                                ptrdiff_t stride) {
    R::Pairs xs[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) xs[t] = R::load_pairs(x + t * stride);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const R::Pairs b = R::load_pairs(w[n]);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[n][t].add_pairs(b, xs[t]);
    }
  }
  static void pack(const float* x, int64_t count, X* to) {
    for (int64_t k = 0; k < count; k += kStep, to += kStep) {
      float values[kStep] = {};
      for (int i = 0; i < kStep && k + i < count; ++i) values[i] = x[k + i];
      R::load(values).store(to);
      R::load(values + R::kWidth).store(to + R::kWidth);
    }
  }
};
#endif

// Multiplies N rows of W, from `row` on, with T rows of x, from t0 on. ahead: elements from a row
// of W to the one that is prefetched meanwhile. A single row is read as one stream with four times
// the accumulators; the rows that follow it in memory are prefetched.
template <class P, int N, int T>
VLORA_INLINE void gemv_tile(const Product& p, int64_t row, const typename P::X* x, ptrdiff_t stride,
                            int64_t t0, ptrdiff_t ahead) {
  using W = typename P::W;
  constexpr int kLine = 64 / int(sizeof(W)), kSteps = kLine / P::kStep, kChains = N == 1 ? 4 : 1;
  if (N == 1) ahead = kPrefetchBytes / int(sizeof(W));
  const W* w[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) w[n] = static_cast<const W*>(p.w) + (row + n) * p.k;
  R acc[kChains][N][T];
#pragma GCC unroll 4
  for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[chain][n][t] = R::zero();
  x += t0 * stride;
  int64_t k = 0;
  for (; k + kChains * kLine <= p.k; k += kChains * kLine) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain)
        __builtin_prefetch(w[n] + ahead + chain * kLine, 0, N == 1 ? 3 : 2);
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i)
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) {
        P::step(acc[chain], w, x, stride);
        x += P::kStep;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) w[n] += P::kStep;
      }
  }
  R(&sums)[N][T] = acc[0];
#pragma GCC unroll 4
  for (int chain = 1; chain < kChains; ++chain)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[n][t] = sums[n][t] + acc[chain][n][t];
  for (; k + P::kStep <= p.k; k += P::kStep) {
    P::step(sums, w, x, stride);
    x += P::kStep;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] += P::kStep;
  }
  // Rows that end within a step are copied, so that nothing is read beyond their end.
  if (k < p.k) {
    W last_w[N][P::kStep] = {};
    typename P::X last_x[T][P::kStep] = {};
    const W* rows[N];
    for (int n = 0; n < N; ++n) {
      for (int64_t i = 0; i < p.k - k; ++i) last_w[n][i] = w[n][i];
      rows[n] = last_w[n];
    }
    const int64_t values = P::kInPlace ? p.k - k : P::kStep;
    for (int t = 0; t < T; ++t)
      for (int64_t i = 0; i < values; ++i) last_x[t][i] = x[t * stride + i];
    P::step(sums, rows, &last_x[0][0], P::kStep);
  }
  float* y = p.y + t0 * p.y_stride + row;
  const float* bias = p.bias ? p.bias + row : nullptr;
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    if constexpr (N == 4) {
      Quad totals = sums_of(sums[0][t], sums[1][t], sums[2][t], sums[3][t]);
      if (bias) totals = totals + Quad::load(bias);
      totals.store(y + t * p.y_stride);
    } else {
      for (int n = 0; n < N; ++n) y[t * p.y_stride + n] = sum_of(sums[n][t]) + (bias ? bias[n] : 0);
    }
  }
}

// A group of rows of W with `rows` rows of x, which are at most T.
template <class P, int T>
VLORA_INLINE void gemv_rows(const Product& p, int64_t row, const typename P::X* x, ptrdiff_t stride,
                            int64_t t0, int64_t rows, ptrdiff_t ahead) {
  if (rows == T) {
    constexpr int N = P::group(T);
    for (int n = 0; n < kGroup; n += N) gemv_tile<P, N, T>(p, row + n, x, stride, t0, ahead);
    return;
  }
  if constexpr (T > 1) gemv_rows<P, T - 1>(p, row, x, stride, t0, rows, ahead);
}

// A group of rows of W with all rows of x, in the smallest number of tiles, of nearly equal height.
template <class P>
VLORA_INLINE void gemv_group(const Product& p, int64_t row, const typename P::X* x,
                             ptrdiff_t stride, ptrdiff_t ahead) {
  const int64_t tiles = ceil_div(p.rows, kGemvRows);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t t = p.rows * i / tiles;
    gemv_rows<P, kGemvRows>(p, row, x, stride, t, p.rows * (i + 1) / tiles - t, i == 0 ? ahead : 0);
  }
}

template <class P>
void gemv(const Product& p, const float* x, ptrdiff_t stride, const Piece& piece) {
  const auto* rows = reinterpret_cast<const typename P::X*>(x);
  stride *= ptrdiff_t(sizeof(float) / sizeof(typename P::X));
  int64_t n = piece.from;
  for (; n + kGroup <= piece.to; n += kGroup) {
    const int64_t next = n + 2 * kGroup <= piece.to                      ? n + kGroup
                         : piece.next >= 0 && piece.next + kGroup <= p.n ? piece.next
                                                                         : n;
    gemv_group<P>(p, n, rows, stride, (next - n) * p.k);
  }
  for (; n < piece.to; ++n)
    for (int64_t t = 0; t < p.rows; ++t) gemv_tile<P, 1, 1>(p, n, rows, stride, t, 0);
}

// Packs rows [from, until) of x to scratch, each followed by zeros up to a full step.
template <class P>
void pack_gemv(const Product& p, float* to, int64_t from, int64_t until) {
  const int64_t stride = ceil_div(p.k, 2 * kLanes) * 2 * kLanes;
  for (int64_t t = from; t < until; ++t)
    P::pack(p.x + t * p.x_stride, p.k, reinterpret_cast<typename P::X*>(to + t * stride));
}

}  // namespace vlora::gemm::VLORA_ISA

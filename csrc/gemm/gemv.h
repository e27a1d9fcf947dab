// Few rows of x: a group of W's rows at a time, sums along the depth in the lanes.
#pragma once

#include "gemm/gemm.h"

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

constexpr int kGroup = 4;  // rows of W that are done before others come
constexpr int kTile = 6;   // most rows of x at once
constexpr int kMany = R::kWidth == 16 ? 4 : 2;
// Rows of W beside most rows of x: the accumulators fill the registers.
constexpr ptrdiff_t kAhead = 2048;  // bytes that a row of W by itself is fetched ahead

// Both sides fp32.
struct Plain {
  using W = float;
  using X = float;
  static constexpr int kStep = R::kWidth;
  static constexpr bool kInPlace = true;
  static constexpr int group(int rows) { return rows <= 3 ? kGroup : kMany; }
  template <int N, int T>
  static VLORA_INLINE void step(R (&acc)[N][T], const W* const (&w)[N], const X* x, ptrdiff_t stride) {
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

// bf16 rows of W made fp32 in registers, even and odd places apart: so lie the rows of x in scratch.
struct Widened {
  using W = uint16_t;
  using X = float;
  static constexpr int kStep = 2 * R::kWidth;
  static constexpr bool kInPlace = false;
  static constexpr int group(int rows) { return rows <= 2 ? 1 : rows == 3 ? kGroup : kMany; }
  template <int N, int T>
  static VLORA_INLINE void step(R (&acc)[N][T], const W* const (&w)[N], const X* x, ptrdiff_t stride) {
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
          const int64_t at = k + 2 * i + odd;
          to[odd * R::kWidth + i] = at < count ? x[at] : 0;
        }
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
// Pairs of bf16: x is rounded.
struct Pairs {
  using W = uint16_t;
  using X = uint16_t;
  static constexpr int kStep = 2 * R::kWidth;
  static constexpr bool kInPlace = false;
  static constexpr int group(int rows) { return rows <= 2 ? 1 : rows == 3 ? kGroup : kMany; }
  template <int N, int T>
  static VLORA_INLINE void step(R (&acc)[N][T], const W* const (&w)[N], const X* x, ptrdiff_t stride) {
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

// ahead: elements from this row to the one that comes next, whose lines are fetched. A row by itself is
// read as one stream, by more accumulators: the rows that follow it lie where it ends.
template <class P, int N, int T>
VLORA_INLINE void few_tile(const Product& p, int64_t row, const typename P::X* x, ptrdiff_t stride,
                           int64_t t0, ptrdiff_t ahead) {
  using W = typename P::W;
  constexpr int kLine = 64 / int(sizeof(W)), kSteps = kLine / P::kStep, kTurns = N == 1 ? 4 : 1;
  if (N == 1) ahead = kAhead / int(sizeof(W));
  const W* w[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) w[n] = static_cast<const W*>(p.w) + (row + n) * p.k;
  R acc[kTurns][N][T];
#pragma GCC unroll 4
  for (int turn = 0; turn < kTurns; ++turn)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[turn][n][t] = R::zero();
  x += t0 * stride;
  int64_t k = 0;
  for (; k + kTurns * kLine <= p.k; k += kTurns * kLine) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int turn = 0; turn < kTurns; ++turn)
        __builtin_prefetch(w[n] + ahead + turn * kLine, 0, N == 1 ? 3 : 2);
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i)
#pragma GCC unroll 4
      for (int turn = 0; turn < kTurns; ++turn) {
        P::step(acc[turn], w, x, stride);
        x += P::kStep;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) w[n] += P::kStep;
      }
  }
  R(&all)[N][T] = acc[0];
#pragma GCC unroll 4
  for (int turn = 1; turn < kTurns; ++turn)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) all[n][t] = all[n][t] + acc[turn][n][t];
  for (; k + P::kStep <= p.k; k += P::kStep) {
    P::step(all, w, x, stride);
    x += P::kStep;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] += P::kStep;
  }
  if (k < p.k) {  // the rows end within a step: nothing is read past them
    W rest[N][P::kStep] = {};
    typename P::X xs[T][P::kStep] = {};
    const W* r[N];
    for (int n = 0; n < N; ++n) {
      for (int64_t i = 0; i < p.k - k; ++i) rest[n][i] = w[n][i];
      r[n] = rest[n];
    }
    const int64_t there = P::kInPlace ? p.k - k : P::kStep;
    for (int t = 0; t < T; ++t)
      for (int64_t i = 0; i < there; ++i) xs[t][i] = x[t * stride + i];
    P::step(all, r, &xs[0][0], P::kStep);
  }
  float* y = p.y + t0 * p.y_stride + row;
  const float* bias = p.bias ? p.bias + row : nullptr;
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    if constexpr (N == 4) {
      __m128 sums = sums_of(all[0][t], all[1][t], all[2][t], all[3][t]);
      if (bias) sums = _mm_add_ps(sums, _mm_loadu_ps(bias));
      _mm_storeu_ps(y + t * p.y_stride, sums);
    } else {
      for (int n = 0; n < N; ++n) y[t * p.y_stride + n] = sum_of(all[n][t]) + (bias ? bias[n] : 0);
    }
  }
}

template <class P, int T>
VLORA_INLINE void few_rows(const Product& p, int64_t row, const typename P::X* x, ptrdiff_t stride,
                           int64_t t0, int64_t rows, ptrdiff_t ahead) {
  if (rows == T) {
    constexpr int N = P::group(T);
    for (int n = 0; n < kGroup; n += N) few_tile<P, N, T>(p, row + n, x, stride, t0, ahead);
    return;
  }
  if constexpr (T > 1) few_rows<P, T - 1>(p, row, x, stride, t0, rows, ahead);
}

template <class P>
VLORA_INLINE void few_group(const Product& p, int64_t row, const typename P::X* x, ptrdiff_t stride,
                            ptrdiff_t ahead) {
  // As few tiles as there must be, of about the same size.
  const int64_t tiles = ceil_div(p.rows, kTile);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t t = p.rows * i / tiles;
    few_rows<P, kTile>(p, row, x, stride, t, p.rows * (i + 1) / tiles - t, i == 0 ? ahead : 0);
  }
}

template <class P>
void few(const Product& p, const float* x, ptrdiff_t stride, const Piece& piece) {
  const auto* rows = reinterpret_cast<const typename P::X*>(x);
  stride *= ptrdiff_t(sizeof(float) / sizeof(typename P::X));
  int64_t n = piece.from;
  for (; n + kGroup <= piece.to; n += kGroup) {
    const int64_t next = n + 2 * kGroup <= piece.to ? n + kGroup
                         : piece.next >= 0 && piece.next + kGroup <= p.n ? piece.next : n;
    few_group<P>(p, n, rows, stride, (next - n) * p.k);
  }
  for (; n < piece.to; ++n)
    for (int64_t t = 0; t < p.rows; ++t) few_tile<P, 1, 1>(p, n, rows, stride, t, 0);
}

// Rows [from, until) of x to scratch, each followed by zeros up to a whole step.
template <class P>
void pack_few(const Product& p, float* to, int64_t from, int64_t until) {
  const int64_t stride = ceil_div(p.k, 2 * kLanes) * 2 * kLanes;
  for (int64_t t = from; t < until; ++t)
    P::pack(p.x + t * p.x_stride, p.k, reinterpret_cast<typename P::X*>(to + t * stride));
}

}  // namespace vlora::gemm::VLORA_ISA

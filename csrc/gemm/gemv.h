// Gemv: a few rows of x times W. One row of W from each of four streams is multiplied at a time.
// Each lane sums a part of the depth.
#pragma once

#include "gemm/gemm.h"

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Maximum number of rows of x in a register tile.
constexpr int kGemvRows = 6;
constexpr bool kManyRegisters = R::kWidth == 16;  // 32 registers instead of 16
// Bytes that each stream is prefetched ahead, into L1. All streams together have 4 KiB in flight,
// more than one core receives from memory within its latency.
constexpr ptrdiff_t kPrefetchBytes = 1024;

// Types of a gemv. W and X: types of the factors in memory. kStep: values of depth in a step.
// kMaxRows: maximum number of rows of x for which a gemv is faster than a gemm. streams(rows):
// number of streams in a tile with this many rows of x. It is two if sixteen registers cannot hold
// the sums of four streams.

// Both factors are fp32; x is read in place.
struct Fp32Gemv {
  using W = float;
  using X = float;
  static constexpr int kStep = R::kWidth;
  static constexpr bool kInPlace = true;
  static constexpr int kMaxRows = kManyRegisters ? 2 * kGemvRows : kGemvRows;
  static constexpr int streams(int rows) { return kManyRegisters || rows <= 4 ? kStreams : 2; }
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

// W is bf16, widened in registers. Each step first multiplies the values with even indices, then
// those with odd indices. x is packed in that order.
struct WidenedGemv {
  using W = uint16_t;
  using X = float;
  static constexpr int kStep = 2 * R::kWidth;
  static constexpr bool kInPlace = false;
  static constexpr int kMaxRows = 2 * kGemvRows;
  static constexpr int streams(int rows) { return kManyRegisters || rows <= 3 ? kStreams : 2; }
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
  static constexpr int kMaxRows = 2 * kGemvRows;
  static constexpr int streams(int rows) { return kManyRegisters || rows <= 3 ? kStreams : 2; }
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

// Multiplies N rows of W, the first being `row` and each `gap` rows after the one before, with T
// rows of x, from t0 on. The tile with t0 = 0 prefetches W.
template <class P, int N, int T>
VLORA_INLINE void gemv_tile(const Product& p, int64_t row, int64_t gap, const typename P::X* x,
                            ptrdiff_t stride, int64_t t0) {
  using W = typename P::W;
  constexpr int kLine = 64 / int(sizeof(W)), kSteps = kLine / P::kStep;
  constexpr ptrdiff_t kAhead = kPrefetchBytes / ptrdiff_t(sizeof(W));
  const W* w[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) w[n] = static_cast<const W*>(p.w) + (row + n * gap) * p.k;
  R sums[N][T];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sums[n][t] = R::zero();
  x += t0 * stride;
  const auto step = [&]() __attribute__((always_inline)) {
    P::step(sums, w, x, stride);
    x += P::kStep;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] += P::kStep;
  };
  int64_t k = 0;
  for (; k + kLine <= p.k; k += kLine) {
    if (t0 == 0) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) __builtin_prefetch(w[n] + kAhead, 0, 3);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kSteps; ++i) step();
  }
  for (; k + P::kStep <= p.k; k += P::kStep) step();
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
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t, y += p.y_stride) {
    float totals[N];
    if constexpr (N == 4) {
      sums_of(sums[0][t], sums[1][t], sums[2][t], sums[3][t]).store(totals);
    } else {
      for (int n = 0; n < N; ++n) totals[n] = sum_of(sums[n][t]);
    }
    for (int n = 0; n < N; ++n) y[n * gap] = totals[n] + (p.bias ? p.bias[row + n * gap] : 0);
  }
}

// Multiplies one row of each stream with `rows` rows of x, which are at most T.
template <class P, int T>
VLORA_INLINE void gemv_streams(const Product& p, int64_t row, int64_t gap, const typename P::X* x,
                               ptrdiff_t stride, int64_t t0, int64_t rows) {
  if (rows == T) {
    constexpr int N = P::streams(T);
    for (int n = 0; n < kStreams; n += N) gemv_tile<P, N, T>(p, row + n * gap, gap, x, stride, t0);
    return;
  }
  if constexpr (T > 1) gemv_streams<P, T - 1>(p, row, gap, x, stride, t0, rows);
}

// Multiplies rows [from, to) of each stream with all rows of x, in as few tiles as possible, of
// nearly equal height. The last piece includes the rows of W that belong to no stream.
template <class P>
void gemv(const Product& p, const float* packed, ptrdiff_t stride, const Piece& piece) {
  const auto* const x = reinterpret_cast<const typename P::X*>(packed);
  const int64_t gap = p.n / kStreams, tiles = ceil_div(p.rows, kGemvRows);
  for (int64_t row = piece.from; row < piece.to; ++row)
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t t = p.rows * i / tiles;
      gemv_streams<P, kGemvRows>(p, row, gap, x, stride, t, p.rows * (i + 1) / tiles - t);
    }
  if (piece.to < gap) return;
  for (int64_t row = kStreams * gap; row < p.n; ++row)
    for (int64_t t = 0; t < p.rows; ++t) gemv_tile<P, 1, 1>(p, row, 0, x, stride, t);
}

// Packs rows [from, until) of x to scratch, each followed by zeros up to a full step.
template <class P>
void pack_gemv(const Product& p, float* to, int64_t from, int64_t until) {
  const int64_t stride = packed_stride(p.k);
  for (int64_t t = from; t < until; ++t)
    P::pack(p.x + t * p.x_stride, p.k, reinterpret_cast<typename P::X*>(to) + t * stride);
}

}  // namespace vlora::gemm::VLORA_ISA

// A tile of a product of many rows: some rows of W against panels of 16 rows of x, in registers.
#pragma once

#include <type_traits>

#include "gemm/gemm.h"

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

constexpr int kAccumulators = R::kWidth == 16 ? 24 : 12;

// A register that holds a panel's whole line meets up to four panels at once, 6 x 4 registers, so that a
// value of W is loaded once for all of them: ten loads for 24 products. Else registers make a line.
constexpr bool kWholeLines = R::kWidth == kLanes;
constexpr int kPanelsAtOnce = kWholeLines ? 4 : 1;

// How rows of W meet a panel. Stored: W in memory; W, X: in the product, X that of the panel. kUnits:
// values of W in a step. kDepth: of a block; its part of the panels that are met at once stays in L1,
// beside what is copied of W. kBatch: values copied at once.

struct Fp32 {
  using Stored = float;
  using W = float;
  using X = float;
  static constexpr int kUnits = 1, kDepth = kWholeLines ? 128 : 256, kBatch = R::kWidth;

  template <int M, int N>
  static VLORA_INLINE void step(R (&acc)[M][N], const W* w, ptrdiff_t stride, const X* x, ptrdiff_t apart) {
    R b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = R::load(x + n * apart);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(w + m * stride);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
    }
  }
  static VLORA_INLINE void copy(const Stored* from, W* to) { R::load(from).store(to); }
};

// bf16 made fp32 where it is copied.
struct Widening : Fp32 {
  using Stored = uint16_t;
  static constexpr int kDepth = 128;

  static VLORA_INLINE void copy(const Stored* from, W* to) { R::load(from).store(to); }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
struct Bf16Pairs {
  static constexpr int kUnits = 2;
  using Stored = uint16_t;
  using W = uint16_t;
  using X = uint16_t;
  static constexpr int kDepth = 256, kBatch = 2 * R::kWidth;

  template <int M, int N>
  static VLORA_INLINE void step(R (&acc)[M][N], const W* w, ptrdiff_t stride, const X* x, ptrdiff_t apart) {
    R::Pairs b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = R::load_pairs(x + n * apart);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const R::Pairs s = R::broadcast_pair(w + m * stride);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_pairs(s, b[n]);
    }
  }
};
#endif

template <class P>
constexpr ptrdiff_t kCopyStride = P::kDepth + 16;
// Of rows of W in scratch, in values: not a power of two, so that they share the cache's sets.

// Rows of y that are about to be written, in a block's columns: brought to L1 one by one.
struct Results {
  const float* y = nullptr;
  ptrdiff_t stride = 0;
  int64_t rows = 0;

  VLORA_INLINE void fetch_row() {
    if (rows <= 0) return;
#pragma GCC unroll 4
    for (int n = 0; n < kBlock; n += kLanes) __builtin_prefetch(y + n, 1, 3);
    --rows;
    y += stride;
  }
};

// What a tile of M rows does beside its sums, for `columns` of its depth: as many rows of W are
// fetched, and others, fetched before, are copied. Apart from the sums either would cost its full time.
template <class P>
struct Beside {
  const typename P::Stored *fetch, *from;
  float* to;
  ptrdiff_t stride;  // of rows of W in memory
  int64_t columns;
  Results* results = nullptr;  // that are fetched as well, all along its depth
};

enum class Also { kNothing, kFetch, kFetchAndCopy };

constexpr ptrdiff_t kSumsApart = kWholeLines ? kBlock * kLanes : R::kWidth;
template <class P>
VLORA_INLINE ptrdiff_t apart(ptrdiff_t depth) {  // of two registers of x
  return kWholeLines ? depth * kLanes : P::kUnits * R::kWidth;
}

template <class P, int M, int N, Also kAlso>
VLORA_INLINE void panel_tile(const typename P::W* w, ptrdiff_t stride, const typename P::X* panel,
                             ptrdiff_t apart, int64_t depth, float* c, bool first, const Beside<P>& beside) {
  R acc[M][N];
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      acc[m][n] = first ? R::zero() : R::load(c + m * kLanes + n * kSumsApart);
  int64_t steps = depth / P::kUnits;
  if constexpr (kAlso != Also::kNothing) {
    constexpr int kLine = 64 / int(sizeof(typename P::Stored));
    const auto fetch_results = [&] {
      if constexpr (kWholeLines)
        if (beside.results) beside.results->fetch_row();
    };
    for (int64_t k = 0; k + kLine <= beside.columns; k += kLine) {
#pragma GCC unroll 24
      for (int m = 0; m < M; ++m) __builtin_prefetch(beside.fetch + m * beside.stride + k, 0, 2);
      fetch_results();
#pragma GCC unroll 1
      for (int i = 0; i < kLine; i += P::kBatch) {
        if constexpr (kAlso == Also::kFetchAndCopy) {
#pragma GCC unroll 24
          for (int m = 0; m < M; ++m)
            P::copy(beside.from + m * beside.stride + k + i, beside.to + m * kCopyStride<P> + k + i);
        }
#pragma GCC unroll 4
        for (int j = 0; j < P::kBatch; j += P::kUnits, w += P::kUnits, panel += P::kUnits * kLanes)
          P::step(acc, w, stride, panel, apart);
      }
      steps -= kLine / P::kUnits;
    }
    if constexpr (kWholeLines) {
      for (; beside.results && steps >= kLine / P::kUnits; steps -= kLine / P::kUnits) {
        fetch_results();
#pragma GCC unroll 1
        for (int i = 0; i < kLine; i += P::kUnits, w += P::kUnits, panel += P::kUnits * kLanes)
          P::step(acc, w, stride, panel, apart);
      }
    }
  }
  for (; steps > 0; --steps, w += P::kUnits, panel += P::kUnits * kLanes)
    P::step(acc, w, stride, panel, apart);
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[m][n].store(c + m * kLanes + n * kSumsApart);
}

// Values [from, until) of rows of W to scratch, with zeros up to a whole batch.
template <class P>
void copy_rows(const typename P::Stored* w, ptrdiff_t stride, int64_t rows, int64_t from,
               int64_t until, float* to) {
  for (int64_t n = 0; n < rows; ++n, w += stride, to += kCopyStride<P>) {
    int64_t k = from;
    for (; k + P::kBatch <= until; k += P::kBatch) P::copy(w + k, to + k);
    if (k < until) {
      typename P::Stored rest[P::kBatch] = {};
      for (int64_t i = k; i < until; ++i) rest[i - k] = w[i];
      P::copy(rest, to + k);
    }
  }
}

}  // namespace vlora::gemm::VLORA_ISA

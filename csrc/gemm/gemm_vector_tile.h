// The register tile of a gemm on vectors: some rows of W with panels of 16 rows of x.
#pragma once

#include <type_traits>

#include "gemm/gemm.h"

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Number of registers for sums.
constexpr int kAccumulators = R::kWidth == 16 ? 24 : 12;

// If a register holds a line of a panel (AVX-512), a tile multiplies up to four panels and loads
// each value of W once for all of them: 6 x 4 registers take ten loads for 24 products. With
// smaller registers a tile multiplies one panel.
constexpr bool kFullLines = R::kWidth == kLanes;
constexpr int kPanelsAtOnce = kFullLines ? 4 : 1;

// Types of a gemm. Stored: type of W in memory. W and X: types of the factors when they are
// multiplied; panels hold X. kUnits: values of depth in a step. kDepth: depth of a block, for which
// a tile's panels and the copy of W stay in L1. kBatch: number of values copied together.

struct Fp32Gemm {
  using Stored = float;
  using W = float;
  using X = float;
  static constexpr int kUnits = 1, kDepth = kFullLines ? 128 : 256, kBatch = R::kWidth;

  template <int M, int N>
  static VLORA_INLINE void step(R (&acc)[M][N], const W* w, ptrdiff_t stride, const X* x,
                                ptrdiff_t register_stride) {
    R b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = R::load(x + n * register_stride);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(w + m * stride);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
    }
  }
  static VLORA_INLINE void copy(const Stored* from, W* to) { R::load(from).store(to); }
};

// bf16 that is widened while it is copied.
struct WidenedGemm : Fp32Gemm {
  using Stored = uint16_t;
  static constexpr int kDepth = 128;

  static VLORA_INLINE void copy(const Stored* from, W* to) { R::load(from).store(to); }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
struct PairsGemm {
  static constexpr int kUnits = 2;
  using Stored = uint16_t;
  using W = uint16_t;
  using X = uint16_t;
  static constexpr int kDepth = 256, kBatch = 2 * R::kWidth;

  template <int M, int N>
  static VLORA_INLINE void step(R (&acc)[M][N], const W* w, ptrdiff_t stride, const X* x,
                                ptrdiff_t register_stride) {
    R::Pairs b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = R::load_pairs(x + n * register_stride);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const R::Pairs s = R::broadcast_pair(w + m * stride);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_pairs(s, b[n]);
    }
  }
};
#endif

// Values between rows of W in scratch. This is not a power of two, so that rows do not fall on the
// same cache sets.
template <class P>
constexpr ptrdiff_t kCopyStride = P::kDepth + 16;

// Values between two registers of a tile, in sums and in x.
constexpr ptrdiff_t kSumRegisterStride = kFullLines ? kBlockRows * kLanes : R::kWidth;
template <class P>
VLORA_INLINE ptrdiff_t x_register_stride(ptrdiff_t depth) {
  return kFullLines ? depth * kLanes : P::kUnits * R::kWidth;
}

// Prefetches to L1 the rows of y that will be written, in the columns of a block.
struct PrefetchResults {
  const float* y = nullptr;
  ptrdiff_t stride = 0;
  int64_t rows = 0;

  VLORA_INLINE void advance() {
    if (rows <= 0) return;
#pragma GCC unroll 4
    for (int n = 0; n < kBlockRows; n += kLanes) __builtin_prefetch(y + n, 1, 3);
    --rows;
    y += stride;
  }
};

// Work for later tiles that a tile of M rows does between its products, for `columns` values of
// depth: it prefetches M rows of W, and copies M other rows that were prefetched before. Separate
// passes for both would take longer.
template <class P>
struct Lookahead {
  const typename P::Stored *prefetch, *from;
  float* to;
  ptrdiff_t stride;  // values between rows of W in memory
  int64_t columns;
  PrefetchResults* results = nullptr;  // rows of y to prefetch along the whole depth; or null
};

enum class LookaheadKind { kNone, kPrefetch, kPrefetchAndCopy };

// Multiplies M rows of W, `stride` values apart, with N registers of x over `depth` values. Adds
// the products to the sums in `c`, or overwrites these if `first`. All sums stay in registers
// meanwhile.
template <class P, int M, int N, LookaheadKind kKind>
VLORA_INLINE void gemm_tile(const typename P::W* w, ptrdiff_t stride, const typename P::X* panel,
                            ptrdiff_t register_stride, int64_t depth, float* c, bool first,
                            const Lookahead<P>& lookahead) {
  R acc[M][N];
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      acc[m][n] = first ? R::zero() : R::load(c + m * kLanes + n * kSumRegisterStride);
  int64_t steps = depth / P::kUnits;
  if constexpr (kKind != LookaheadKind::kNone) {
    constexpr int kLine = 64 / int(sizeof(typename P::Stored));
    const auto prefetch_results = [&] {
      if constexpr (kFullLines)
        if (lookahead.results) lookahead.results->advance();
    };
    for (int64_t k = 0; k + kLine <= lookahead.columns; k += kLine) {
#pragma GCC unroll 24
      for (int m = 0; m < M; ++m)
        __builtin_prefetch(lookahead.prefetch + m * lookahead.stride + k, 0, 2);
      prefetch_results();
#pragma GCC unroll 1
      for (int i = 0; i < kLine; i += P::kBatch) {
        if constexpr (kKind == LookaheadKind::kPrefetchAndCopy) {
#pragma GCC unroll 24
          for (int m = 0; m < M; ++m)
            P::copy(lookahead.from + m * lookahead.stride + k + i,
                    lookahead.to + m * kCopyStride<P> + k + i);
        }
#pragma GCC unroll 4
        for (int j = 0; j < P::kBatch; j += P::kUnits, w += P::kUnits, panel += P::kUnits * kLanes)
          P::step(acc, w, stride, panel, register_stride);
      }
      steps -= kLine / P::kUnits;
    }
    if constexpr (kFullLines) {
      for (; lookahead.results && steps >= kLine / P::kUnits; steps -= kLine / P::kUnits) {
        prefetch_results();
#pragma GCC unroll 1
        for (int i = 0; i < kLine; i += P::kUnits, w += P::kUnits, panel += P::kUnits * kLanes)
          P::step(acc, w, stride, panel, register_stride);
      }
    }
  }
  for (; steps > 0; --steps, w += P::kUnits, panel += P::kUnits * kLanes)
    P::step(acc, w, stride, panel, register_stride);
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[m][n].store(c + m * kLanes + n * kSumRegisterStride);
}

// Copies values [from, until) of rows of W to scratch, with zeros up to a full batch.
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

// The register tiles of attention on vectors: scores of some queries for panels of keys, and
// weighted sums of panels of values.
#pragma once

#include "attention/pages.h"
#include "attention/softmax.h"

namespace vlora::attention::VLORA_ISA {

// Number of registers for a panel's line.
constexpr int kRegisters = kLanes / R::kWidth;
// Whether a line is one register. There are then 32 registers, otherwise 16.
constexpr bool kFullLines = kRegisters == 1;
// Maximum number of queries in a tile. Their sums over one or two panels fill the registers.
constexpr int kMaxTileQueries = kFullLines ? kTallTileQueries : kTileQueries;
// Amount of each panel that is read before the next panel's turn, if several panels are read in
// rotation: bytes of keys, and tokens of values.
constexpr int64_t kKeyRunBytes = 512, kValueRunTokens = 4;
// Floats between queries. It does not depend on the dim, so that addresses need no registers. No
// two queries fall on the same cache sets.
constexpr int64_t kQueryStride = kMaxDim + kLanes;

// Returns the number of panels, or groups of 16 columns, with which M queries fill the registers
// with sums.
constexpr int at_once(int queries) {
  if (kFullLines) return queries <= 6 ? 4 : 2;
  return queries == 1 ? 4 : queries <= 3 ? 2 : 1;
}

// Loads the first or the second line of a pair. In fp32 the lines are `row` elements apart. In bf16
// they are interleaved value by value, and a shift or a mask widens them.
template <class T, int N>
VLORA_INLINE void load(const T* pair, ptrdiff_t row, int second, R (&to)[N]) {
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    if constexpr (sizeof(T) == 2) {
      const T* const from = pair + n * 2 * R::kWidth;
      to[n] = second ? R::odd(from) : R::even(from);
    } else {
      to[n] = R::load(pair + second * row + n * R::kWidth);
    }
  }
}

// Prefetches a line to L2.
template <class T>
VLORA_INLINE void prefetch_to_l2(const T* line) {
  __builtin_prefetch(line, 0, 2);
}

// Computes scores of the tokens of P panels, [dim][kLanes], for M queries, over depths from …
// until, which are even. Unless `from` is 0, the scores so far are added. kPrefetch: whether a
// panel's bytes are prefetched from `prefetch`. later: for each panel another one, which is
// prefetched to L2, or null. A score is one sum in the order of depths, so that its bits do not
// depend on M and P; reading the keys takes longer.
template <class T, int M, int P, bool kPrefetch>
VLORA_INLINE void score(const float* q, const T* const* keys, int64_t from, int64_t until,
                        float* scores, const char* prefetch, const T* const* later) {
  R acc[P][M][kRegisters];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n)
        acc[p][m][n] =
            from == 0 ? R::zero() : R::load(scores + m * kScoreStride + p * kLanes + n * R::kWidth);
  const T* panels[P];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) panels[p] = keys[p];
  const auto add = [&](int64_t d, int second) __attribute__((always_inline)) {
    R b[P][kRegisters];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) load(panels[p] + d * kLanes, kLanes, second, b[p]);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(q + m * kQueryStride + d + second);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
        for (int n = 0; n < kRegisters; ++n) acc[p][m][n].add_product(s, b[p][n]);
    }
  };
  for (int64_t d = from; d < until; d += 2) {
    constexpr ptrdiff_t kRow = kLanes * sizeof(T);
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      if constexpr (kPrefetch)
        if (k * kRow % 64 == 0) __builtin_prefetch(prefetch + (d + k) * kRow);
      if (later && k * kRow % 64 == 0) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) prefetch_to_l2(later[p] + (d + k) * kLanes);
      }
      add(d, k);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n)
        acc[p][m][n].store(scores + m * kScoreStride + p * kLanes + n * R::kWidth);
}

// Computes scores for at most P panels.
template <class T, int M, int P>
VLORA_INLINE void score_up_to(int64_t panels, const float* q, const T* const* keys, int64_t from,
                              int64_t until, float* scores, const T* const* later) {
  if (panels >= P) return score<T, M, P, false>(q, keys, from, until, scores, nullptr, later);
  if constexpr (P > 1) score_up_to<T, M, P - 1>(panels, q, keys, from, until, scores, later);
}

// Computes scores for any number of panels. As many are taken together as fill the registers with
// sums. If there are more, they take turns for a run of depths each.
template <class T, int M>
void score_panels(const float* q, const T* const* keys, int64_t panels, int64_t dim, float* scores,
                  const char* prefetch, const T* const* later) {
  constexpr int kAtOnce = at_once(M);
  if (prefetch) return score<T, M, 1, true>(q, keys, 0, dim, scores, prefetch, nullptr);
  const int64_t each = panels <= kAtOnce ? dim : kKeyRunBytes / (kLanes * int64_t(sizeof(T)));
  for (int64_t d = 0; d < dim; d += each) {
    const int64_t until = d + each < dim ? d + each : dim;
    for (int64_t p = 0; p < panels; p += kAtOnce)
      score_up_to<T, M, kAtOnce>(panels - p, q, keys + p, d, until, scores + p * kLanes,
                                 later ? later + p : nullptr);
  }
}

// Computes scores for at most M queries.
template <class T, int M = kMaxTileQueries>
VLORA_INLINE void score_queries(int64_t queries, const float* q, const T* const* keys,
                                int64_t panels, int64_t dim, float* scores, const char* prefetch,
                                const T* const* later) {
  if (queries >= M) return score_panels<T, M>(q, keys, panels, dim, scores, prefetch, later);
  if constexpr (M > 1)
    score_queries<T, M - 1>(queries, q, keys, panels, dim, scores, prefetch, later);
}

// Adds weights times values to `out`, for tokens from … until of some panels, M queries and N
// registers of columns. `from` is even. kInterleaved: panels are read in rotation, two tokens of
// each. kPrefetch: as in `score`, for the first panel. later: as in `score`, if panels are
// interleaved.
template <class T, int M, int N, bool kInterleaved, bool kPrefetch>
VLORA_INLINE void add_values(const float* weights, const T* const* values, int64_t panels,
                             int64_t from, int64_t until, int64_t column, int64_t padded,
                             float* out, const char* prefetch, const T* const* later) {
  // Number of values of a column that are contiguous in memory.
  constexpr int kPair = int(4 / sizeof(T));
  R acc[M][N];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = R::load(out + m * padded + column + n * R::kWidth);
  const auto add = [&](const T* pair, const float* w, int second) __attribute__((always_inline)) {
    R b[N];
    load(pair, padded, second, b);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(w + m * kScoreStride + second);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
    }
  };
  // The value after the last token is not used, although it may be the other half of a pair.
  const auto add_pair = [&](int64_t p, int64_t t) __attribute__((always_inline)) {
    const T* const pair = values[p] + t * padded + column * kPair;
    const float* const w = weights + p * kLanes + t;
    add(pair, w, 0);
    if (t + 1 < until) add(pair, w, 1);
  };
  if constexpr (kInterleaved) {
    for (int64_t t = from; t < until; t += 2)
      for (int64_t p = 0; p < panels; ++p) {
        if (later) {
          const T* const lines = later[p] + t * padded + column * kPair;
#pragma GCC unroll 8
          for (int i = 0; i < N * R::kWidth * kPair; i += int(64 / sizeof(T))) {
            prefetch_to_l2(lines + i);
            if (kPair == 1) prefetch_to_l2(lines + padded + i);
          }
        }
        add_pair(p, t);
      }
  } else {
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t t = from; t < until; t += 2) {
        if constexpr (kPrefetch) {
          const char* const lines = prefetch + (t * padded + column * kPair) * ptrdiff_t(sizeof(T));
#pragma GCC unroll 8
          for (size_t line = 0; line < 4 * N * R::kWidth; line += 64) {
            __builtin_prefetch(lines + line);
            if (kPair == 1) __builtin_prefetch(lines + padded * ptrdiff_t(sizeof(T)) + line);
          }
        }
        add_pair(p, t);
      }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n].store(out + m * padded + column + n * R::kWidth);
}

// Adds weights times values for all columns. As many are taken together as fill the registers.
template <class T, int M, bool kInterleaved>
void add_all_values(const float* weights, const T* const* values, int64_t panels, int64_t tokens,
                    int64_t padded, float* out, const char* prefetch, const T* const* later) {
  constexpr int N = at_once(M) * kRegisters;
  const int64_t each = kInterleaved && panels > 1 ? kValueRunTokens : tokens;
  for (int64_t t = 0; t < tokens; t += each) {
    const int64_t until = t + each < tokens ? t + each : tokens;
    int64_t column = 0;
    for (; column + N * R::kWidth <= padded; column += N * R::kWidth)
      prefetch ? add_values<T, M, N, false, true>(weights, values, panels, t, until, column, padded,
                                                  out, prefetch, nullptr)
               : add_values<T, M, N, kInterleaved, false>(weights, values, panels, t, until, column,
                                                          padded, out, nullptr, later);
    for (; column < padded; column += kLanes)
      add_values<T, M, kRegisters, kInterleaved, false>(weights, values, panels, t, until, column,
                                                        padded, out, nullptr, later);
  }
}

// Adds weights times values for any number of queries, M at a time.
template <class T, int M, bool kInterleaved>
void add_values_of_queries(int64_t queries, const float* weights, const T* const* values,
                           int64_t panels, int64_t tokens, int64_t padded, float* out,
                           const char* prefetch, const T* const* later) {
  for (; queries >= M;
       queries -= M, weights += M * kScoreStride, out += M * padded, prefetch = nullptr)
    add_all_values<T, M, kInterleaved>(weights, values, panels, tokens, padded, out, prefetch,
                                       later);
  if constexpr (M > 1)
    if (queries > 0)
      add_values_of_queries<T, M - 1, kInterleaved>(queries, weights, values, panels, tokens,
                                                    padded, out, prefetch, later);
}

}  // namespace vlora::attention::VLORA_ISA

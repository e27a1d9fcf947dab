// Many rows: values of W are broadcast against panels of 16 rows of x.
#pragma once

#include "linear/linear.h"

namespace vlora::linear::VLORA_ISA {

using namespace vlora::cpu::VLORA_ISA;

constexpr ptrdiff_t kCopyStride = kDepth + 16;
// Of rows of W in scratch, in fp32 values: not a power of two, so that they share the cache's sets.
constexpr int kAccumulators = R::kWidth == 16 ? 24 : 12;

struct BroadcastFp32 {
  using W = float;
  using X = float;
  static constexpr int kUnits = 1;  // values of W in a step
  template <int M, int N>
  static VLORA_INLINE void step(R (&acc)[M][N], const W* w, ptrdiff_t stride, const X* x) {
    R b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = R::load(x + n * R::kWidth);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(w + m * stride);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
    }
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
struct BroadcastPairs {
  using W = uint16_t;
  using X = uint16_t;
  static constexpr int kUnits = 2;
  template <int M, int N>
  static VLORA_INLINE void step(R (&acc)[M][N], const W* w, ptrdiff_t stride, const X* x) {
    R::Pairs b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = R::load_pairs(x + n * 2 * R::kWidth);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const R::Pairs s = R::broadcast_pair(w + m * stride);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_pairs(s, b[n]);
    }
  }
};
#endif

// What a tile of M rows fetches meanwhile: as many rows of W, a line of each per line of depth.
struct Fetch {
  const char* from;  // null: nothing
  ptrdiff_t stride;
  int64_t lines;  // of each row
};

template <class P, int M, int N, bool kFetch>
VLORA_INLINE void panel_tile(const typename P::W* w, ptrdiff_t stride, const typename P::X* panel,
                             int64_t depth, float* c, bool first, const Fetch& fetch) {
  R acc[M][N];
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      acc[m][n] = first ? R::zero() : R::load(c + m * kLanes + n * R::kWidth);
  int64_t steps = depth / P::kUnits;
  constexpr int kPerLine = 16;  // steps between two lines
  if constexpr (kFetch) {
    const char* from = fetch.from;
    for (int64_t line = 0; line < fetch.lines && steps >= kPerLine; ++line, from += 64) {
#pragma GCC unroll 24
      for (int m = 0; m < M; ++m) __builtin_prefetch(from + m * fetch.stride, 0, 2);
#pragma GCC unroll 1
      for (int i = 0; i < kPerLine; ++i, w += P::kUnits, panel += P::kUnits * kLanes)
        P::step(acc, w, stride, panel);
      steps -= kPerLine;
    }
  }
  for (; steps > 0; --steps, w += P::kUnits, panel += P::kUnits * kLanes)
    P::step(acc, w, stride, panel);
#pragma GCC unroll 24
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[m][n].store(c + m * kLanes + n * R::kWidth);
}

// N registers of a panel: one where it has no more rows than that. kStride: 0, or that of the rows.
template <class P, int N, ptrdiff_t kStride>
void panel_block(const typename P::W* w, ptrdiff_t w_stride, const typename P::X* panel, int64_t depth,
                 float* c, bool first, int64_t rows, Fetch fetch) {
  constexpr int M = kAccumulators / N;
  const ptrdiff_t stride = kStride ? kStride : w_stride;
  int64_t n = 0;
  if (fetch.from) {
    for (; n + M <= rows; n += M, fetch.from += M * fetch.stride)
      panel_tile<P, M, N, true>(w + n * stride, stride, panel, depth, c + n * kLanes, first, fetch);
  } else {
    for (; n + M <= rows; n += M)
      panel_tile<P, M, N, false>(w + n * stride, stride, panel, depth, c + n * kLanes, first, fetch);
  }
  for (; n < rows; ++n)
    panel_tile<P, 1, N, false>(w + n * stride, stride, panel, depth, c + n * kLanes, first, fetch);
}

template <class T>
VLORA_INLINE void widen(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + R::kWidth <= count; i += R::kWidth) R::load(from + i).store(to + i);
  if (i < count) {
    T rest[R::kWidth] = {};
    float values[R::kWidth];
    for (int64_t j = i; j < count; ++j) rest[j - i] = from[j];
    R::load(rest).store(values);
    __builtin_memcpy(to + i, values, size_t(count - i) * sizeof(float));
  }
}

// The sums of a piece, [panel][row of W][row of x], to y.
inline void store_sums(const Product& p, const Piece& piece, const float* c) {
  const int64_t rows = piece.to - piece.from;
  for (int64_t panel = 0; panel < piece.panels; ++panel, c += kBlock * kLanes) {
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
          for (int i = 0; i < 4; ++i) s[i] = _mm_loadu_ps(c + (n + i) * kLanes + t);
          _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
          for (int i = 0; i < 4; ++i) {
            if (bias) s[i] = _mm_add_ps(s[i], _mm_loadu_ps(bias + n));
            _mm_storeu_ps(to + i * p.y_stride, s[i]);
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

// Stored: the type of W in memory. P: that of the product; W is copied to it where it differs, or
// where kCopied says so.
template <class Stored, class P, bool kCopied>
void many(const Product& p, const float* packed, const Piece& piece, float* scratch) {
  using W = typename P::W;
  using X = typename P::X;
  const int64_t rows = piece.to - piece.from;
  float* const sums = scratch + kBlock * kCopyStride;
  const Stored* const all = static_cast<const Stored*>(p.w);
  const int64_t depths = ceil_div(p.k, P::kUnits) * P::kUnits;  // of a panel
  for (int64_t k = 0; k < p.k; k += kDepth) {
    const int64_t depth = p.k - k < kDepth ? p.k - k : kDepth;
    const Stored* const here = all + piece.from * p.k + k;
    // What comes next: the rest of these rows, or other ones.
    Fetch fetch{nullptr, p.k * ptrdiff_t(sizeof(Stored)), 0};
    const int64_t k_next = k + kDepth < p.k ? k + kDepth : 0;
    const int64_t row = k_next ? piece.from : piece.next;
    if (row >= 0 && row + rows <= p.n) {
      fetch.from = reinterpret_cast<const char*>(all + row * p.k + k_next);
      fetch.lines = (p.k - k_next < kDepth ? p.k - k_next : kDepth) * ptrdiff_t(sizeof(Stored)) / 64;
    }
    const W* w;
    if constexpr (kCopied) {
      for (int64_t n = 0; n < rows; ++n) widen(here + n * p.k, scratch + n * kCopyStride, depth);
      w = scratch;
    } else {
      w = here;
    }
    constexpr ptrdiff_t kStride = kCopied ? kCopyStride : 0;
    for (int64_t panel = 0; panel < piece.panels; ++panel, fetch.from = nullptr) {
      const X* x = reinterpret_cast<const X*>(packed) + (piece.panel + panel) * kLanes * depths;
      float* c = sums + panel * kBlock * kLanes;
      x += k * kLanes;
      if (p.rows - (piece.panel + panel) * kLanes <= R::kWidth) {
        panel_block<P, 1, kStride>(w, p.k, x, depth, c, k == 0, rows, fetch);
      } else {
        panel_block<P, kLanes / R::kWidth, kStride>(w, p.k, x, depth, c, k == 0, rows, fetch);
      }
    }
  }
  store_sums(p, piece, sums);
}

// Panels [from, until) of x: 16 rows (zeros where there are fewer) side by side, value by value, or
// pair of bf16 by pair.
inline void pack_many(const Product& p, bool pairs, float* to, int64_t from, int64_t until) {
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
#ifdef VLORA_HAS_BF16_PRODUCTS
      if (pairs) {
        uint16_t* out = reinterpret_cast<uint16_t*>(to) + panel * kLanes * p.k;
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
        continue;
      }
#endif
      (void)pairs;
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

}  // namespace vlora::linear::VLORA_ISA

// The register tile: one template for every instruction set, product and storage type.
//
// Each generated translation unit includes it once, after the instruction set's vector type. The
// units are compiled with different flags, so they must not share code. Everything here is
// therefore in the instruction set's namespace (VLORA_ISA), and no standard container is used.
#pragma once

#include "atmm/kernels.h"

namespace vlora::atmm::VLORA_ISA {

using runtime::VLORA_ISA::V;

// fp32 rows times fp32 panels.
struct Fp32 {
  static constexpr int kWords = 1;              // words of a row for each line of a panel
  static constexpr bool kTwoStepLines = false;  // whether a line holds two steps (narrow panels)
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panels) {
    V b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = V::load(reinterpret_cast<const float*>(panels + n * 64));
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const V::Scalar s = V::broadcast(x + m * (kStride ? kStride : stride));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
    }
  }
};

// fp32 rows times bf16 panels converted to fp32 in registers. A step has two values of depth.
struct Bf16Widened {
  static constexpr int kWords = 2;
  static constexpr bool kTwoStepLines = false;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panels) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      V b[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) b[n] = V::load_half_of_pairs(panels + n * 64, half);
#pragma GCC unroll 24
      for (int m = 0; m < M; ++m) {
        const V::Scalar s = V::broadcast(x + m * (kStride ? kStride : stride) + half);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
      }
    }
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
// Pairs of bf16 times panels of pairs. One instruction adds both products to an fp32 sum.
struct Bf16Pairs {
  static constexpr int kWords = 1;
  static constexpr bool kTwoStepLines = false;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panels) {
    V::Pairs b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = V::load_pairs(panels + n * 64);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
      const V::Pairs s = V::broadcast_pair(x + m * (kStride ? kStride : stride));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].add_pairs(s, b[n]);
    }
  }
};
#endif

// Narrow panels: eight columns, with two steps interleaved in a line. A register then holds two
// sums for each column: over the even steps and over the odd steps. Scratch holds both as well,
// until the last part of the depth adds them.
struct NarrowFp32 {
  static constexpr int kWords = 2;
  static constexpr bool kTwoStepLines = true;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panel) {
    const V b = V::load(reinterpret_cast<const float*>(panel));
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
      acc[m][0].add_product(V::broadcast_two(x + m * (kStride ? kStride : stride)), b);
  }
};

struct NarrowWidened {
  static constexpr int kWords = 4;
  static constexpr bool kTwoStepLines = true;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panel) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const V b = V::load_half_of_pairs(panel, half);
#pragma GCC unroll 24
      for (int m = 0; m < M; ++m)
        acc[m][0].add_product(V::broadcast_two_of_four(x + m * (kStride ? kStride : stride), half),
                              b);
    }
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
struct NarrowPairs {
  static constexpr int kWords = 2;
  static constexpr bool kTwoStepLines = true;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panel) {
    const V::Pairs b = V::load_pairs(panel);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
      acc[m][0].add_pairs(V::broadcast_two_pairs(x + m * (kStride ? kStride : stride)), b);
  }
};
#endif

// Epilogue of the first product. It stores the tile to scratch.
struct ToScratch {
  template <int M, int N>
  static inline __attribute__((always_inline)) void begin(V (&acc)[M][N], const Tile& t,
                                                          int64_t group) {
    const float* out = static_cast<const float*>(t.out) + group * t.group_columns;
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        acc[m][n] = t.first_part ? V::zero() : V::load(out + m * kScratchStride + n * kPanel);
  }
  template <int M, int N>
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t,
                                                        int64_t group) {
    float* out = static_cast<float*>(t.out) + group * t.group_columns;
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].store(out + m * kScratchStride + n * kPanel);
  }
};

// Epilogue of the first product for a narrow panel: the last part of the depth adds the sums over
// even and odd steps.
struct NarrowToScratch : ToScratch {
  template <int M, int N>
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t,
                                                        int64_t group) {
    if (!t.last_part) return ToScratch::end<M, N>(acc, t, group);
    float* out = static_cast<float*>(t.out);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) acc[m][0].store_pair_sums(out + m * kScratchStride);
  }
};

// Epilogue of the second product and of the merge: out = in + sign * tile. T is the storage type.
// kBypass: whether the stores bypass the caches.
template <class T, bool kBypass>
struct Added {
  template <int M, int N>
  static inline __attribute__((always_inline)) void begin(V (&acc)[M][N], const Tile& t,
                                                          int64_t group) {
    const T* in = static_cast<const T*>(t.in) + group * t.group_columns;
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        acc[m][n] = V::zero();
        __builtin_prefetch(in + t.in_ahead + m * t.in_stride + n * kPanel, 0, 3);
      }
    }
  }
  template <int M, int N>
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t,
                                                        int64_t group) {
    const T* in = static_cast<const T*>(t.in) + group * t.group_columns;
    T* out = static_cast<T*>(t.out) + group * t.group_columns;
    const V::Scalar sign = V::broadcast(&t.sign);
    const bool cut = t.tail < kPanel && group == t.groups - 1;
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const T* from = in + m * t.in_stride + n * kPanel;
        T* to = out + m * t.out_stride + n * kPanel;
        if constexpr (V::kFullLines && sizeof(T) == 2 && N % 2 == 0) {
          // Store whole lines, which takes half as many stores.
          if (n < N - 2 || !cut) {
            if (n % 2) continue;
            V first = V::load(from), second = V::load(from + kPanel);
            first.add_product(sign, acc[m][n]);
            second.add_product(sign, acc[m][n + 1]);
            V::store_two(to, first, second, kBypass);
            continue;
          }
        }
        if (n == N - 1 && cut) {
          V sum = V::load_some(from, t.tail);
          sum.add_product(sign, acc[m][n]);
          sum.store_some(to, t.tail);
        } else {
          V sum = V::load(from);
          sum.add_product(sign, acc[m][n]);
          if constexpr (kBypass) {
            sum.stream(to);
          } else {
            sum.store(to);
          }
        }
      }
    }
  }
};

// Computes M rows by N panels, with kChains partial sums over the depth. If M * N is small, a
// single chain of dependent multiply-adds per accumulator does not fill the pipeline. kStride:
// words between rows, or 0 for t.x_stride. kPrefetch: whether panels are prefetched.
template <class Product, class End, int M, int N, int kChains, int kStride, bool kPrefetch>
void tile(const Tile& t) {
  const char* panels = t.panels;
  for (int64_t group = 0; group < t.groups; ++group, panels += t.group_bytes) {
    V acc[kChains][M][N];
    End::template begin<M, N>(acc[0], t, group);
    if constexpr (kChains > 1) {
#pragma GCC unroll 8
      for (int c = 1; c < kChains; ++c)
#pragma GCC unroll 24
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) acc[c][m][n] = V::zero();
    }
    const float* x = static_cast<const float*>(t.x);
    const char* p = panels;
    int64_t lines = Product::kTwoStepLines ? t.steps / 2 : t.steps;
    for (; lines >= kChains; lines -= kChains) {
#pragma GCC unroll 8
      for (int c = 0; c < kChains; ++c) {
        if constexpr (kPrefetch) {
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) __builtin_prefetch(p + n * 64 + t.prefetch, 0, 3);
        }
        Product::template step<M, N, kStride>(acc[c], x + c * Product::kWords, t.x_stride, p);
        p += t.step_bytes;
      }
      x += kChains * Product::kWords;
    }
    if constexpr (kChains > 1) {
      for (; lines > 0; --lines) {
        Product::template step<M, N, kStride>(acc[0], x, t.x_stride, p);
        x += Product::kWords;
        p += t.step_bytes;
      }
    }
    if constexpr (Product::kTwoStepLines) {
      if (t.steps % 2) {
        // The last line holds only one step. The rows may end there. They are copied, so that
        // nothing is read beyond their end.
        float last[M][4] = {};
#pragma GCC unroll 24
        for (int m = 0; m < M; ++m)
          for (int i = 0; i < Product::kWords / 2; ++i)
            last[m][i] = x[m * (kStride ? kStride : t.x_stride) + i];
        Product::template step<M, N, 4>(acc[0], &last[0][0], 4, p);
      }
    }
    if constexpr (kChains > 1) {
#pragma GCC unroll 8
      for (int half = kChains / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int c = 0; c < half; ++c)
#pragma GCC unroll 24
          for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) acc[c][m][n].add(acc[c + half][m][n]);
    }
    End::template end<M, N>(acc[0], t, group);
  }
}

}  // namespace vlora::atmm::VLORA_ISA

// The register tile, one template for every instruction set, product and storage type.
//
// Included once per generated translation unit, after the instruction set's vector type; each unit
// is compiled with its own flags, so nothing here may be shared with another unit: everything is in
// the instruction set's namespace (kIsaNamespace) and no standard container is used.
#pragma once

#include "atmm/kernels.h"

namespace vlora::atmm::VLORA_ISA {

using runtime::VLORA_ISA::V;

// fp32 rows times fp32 panels.
struct Fp32 {
  static constexpr int kUnits = 1;    // of a row, in one line of a panel
  static constexpr bool kHalf = false;  // whether a line may be half beyond the depth
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

// fp32 rows times bf16 panels, made fp32 in registers: two depths a step.
struct Bf16Widened {
  static constexpr int kUnits = 2;
  static constexpr bool kHalf = false;
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
// Pairs of bf16 times panels of pairs, by the instruction that adds both products to fp32.
struct Bf16Pairs {
  static constexpr int kUnits = 1;
  static constexpr bool kHalf = false;
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

// Narrow panels: eight rows, two units of depth side by side. A register then holds eight sums twice,
// over the even and the odd units; so does scratch, until the last part of the depth adds them.
struct NarrowFp32 {
  static constexpr int kUnits = 2;
  static constexpr bool kHalf = true;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panel) {
    const V b = V::load(reinterpret_cast<const float*>(panel));
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
      acc[m][0].add_product(V::two(x + m * (kStride ? kStride : stride)), b);
  }
};

struct NarrowWidened {
  static constexpr int kUnits = 4;
  static constexpr bool kHalf = true;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panel) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const V b = V::load_half_of_pairs(panel, half);
#pragma GCC unroll 24
      for (int m = 0; m < M; ++m)
        acc[m][0].add_product(V::two_of_four(x + m * (kStride ? kStride : stride), half), b);
    }
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
struct NarrowPairs {
  static constexpr int kUnits = 2;
  static constexpr bool kHalf = true;
  template <int M, int N, int kStride>
  static inline __attribute__((always_inline)) void step(V (&acc)[M][N], const float* x,
                                                         ptrdiff_t stride, const char* panel) {
    const V::Pairs b = V::load_pairs(panel);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
      acc[m][0].add_pairs(V::two_pairs(x + m * (kStride ? kStride : stride)), b);
  }
};
#endif

// The tile's end: to scratch.
struct ToScratch {
  template <int M, int N>
  static inline __attribute__((always_inline)) void begin(V (&acc)[M][N], const Tile& t, int64_t group) {
    const float* out = static_cast<const float*>(t.out) + group * t.group_columns;
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        acc[m][n] = t.first ? V::zero() : V::load(out + m * kRowStride + n * kPanel);
  }
  template <int M, int N>
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t, int64_t group) {
    float* out = static_cast<float*>(t.out) + group * t.group_columns;
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n].store(out + m * kRowStride + n * kPanel);
  }
};

// The same of a narrow panel, whose even and odd sums the last part of the depth adds.
struct NarrowToScratch : ToScratch {
  template <int M, int N>
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t, int64_t group) {
    if (!t.last) return ToScratch::end<M, N>(acc, t, group);
    float* out = static_cast<float*>(t.out);
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) acc[m][0].store_sums_of_two(out + m * kRowStride);
  }
};

// (A template: not every V joins.)
template <class Vector>
inline __attribute__((always_inline)) void store_line(uint16_t* to, Vector first, Vector second,
                                                      bool past_caches) {
  Vector::store_joined(to, first, second, past_caches);
}

// The tile's end: out = in + sign * tile. T is the storage type.
template <class T, bool kStream>
struct Added {
  template <int M, int N>
  static inline __attribute__((always_inline)) void begin(V (&acc)[M][N], const Tile& t, int64_t group) {
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
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t, int64_t group) {
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
        if constexpr (V::kJoins && sizeof(T) == 2 && N % 2 == 0) {
          // A line at a time: half as many stores.
          if (n < N - 2 || !cut) {
            if (n % 2) continue;
            V first = V::load(from), second = V::load(from + kPanel);
            first.add_product(sign, acc[m][n]);
            second.add_product(sign, acc[m][n + 1]);
            store_line<V>(to, first, second, kStream);
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
          if constexpr (kStream) {
            sum.store_past_caches(to);
          } else {
            sum.store(to);
          }
        }
      }
    }
  }
};

// Rows M, panels N, and kChains partial sums over the depth: one chain of dependent multiply-adds
// per accumulator does not fill the pipeline where M * N is small. kFetch: panels are fetched ahead.
template <class Product, class End, int M, int N, int kChains, int kStride, bool kFetch>
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
    int64_t left = Product::kHalf ? t.steps / 2 : t.steps;  // lines
    for (; left >= kChains; left -= kChains) {
#pragma GCC unroll 8
      for (int c = 0; c < kChains; ++c) {
        if constexpr (kFetch) {
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) __builtin_prefetch(p + n * 64 + t.prefetch, 0, 3);
        }
        Product::template step<M, N, kStride>(acc[c], x + c * Product::kUnits, t.x_stride, p);
        p += t.step_bytes;
      }
      x += kChains * Product::kUnits;
    }
    if constexpr (kChains > 1) {
      for (; left > 0; --left) {
        Product::template step<M, N, kStride>(acc[0], x, t.x_stride, p);
        x += Product::kUnits;
        p += t.step_bytes;
      }
    }
    if constexpr (Product::kHalf) {
      if (t.steps % 2) {
        // The rows may end with the first half: nothing is read past them.
        float last[M][4] = {};
#pragma GCC unroll 24
        for (int m = 0; m < M; ++m)
          for (int i = 0; i < Product::kUnits / 2; ++i)
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

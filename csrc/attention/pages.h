// Kernels that write keys and values to the pages, for one instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/attention.h"
#include "runtime/scratch.h"

namespace vlora::attention::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Rotates each pair x[i], x[i + half] by the angle of i (rotary embedding) and multiplies it by
// `scale`.
VLORA_INLINE void rotate(const float* x, const float* cosines, const float* sines, int64_t half,
                         float scale, float* to) {
  const R factor = R::all(scale);
  int64_t i = 0;
  for (; i + R::kWidth <= half; i += R::kWidth) {
    const R a = R::load(x + i), b = R::load(x + half + i);
    const R c = R::load(cosines + i), s = R::load(sines + i);
    ((a * c - b * s) * factor).store(to + i);
    ((b * c + a * s) * factor).store(to + half + i);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    to[i] = (a * cosines[i] - b * sines[i]) * scale;
    to[half + i] = (b * cosines[i] + a * sines[i]) * scale;
  }
}

// Converts x, [dim] fp32, to the storage type.
template <class T>
VLORA_INLINE void convert(const float* x, int64_t dim, T* to) {
  int64_t d = 0;
  for (; d + R::kWidth <= dim; d += R::kWidth) R::load(x + d).store(to + d);
  if (d == dim) return;
  float rest[R::kWidth] = {};
  T converted[R::kWidth];
  for (int64_t i = d; i < dim; ++i) rest[i - d] = x[i];
  R::load(rest).store(converted);
  for (int64_t i = d; i < dim; ++i) to[i] = converted[i - d];
}

// Returns whether all of x, [dim], is finite. A finite value minus itself is zero. For any other
// value this difference is NaN.
template <class T>
VLORA_INLINE bool is_finite(const T* x, int64_t dim) {
  R differences = R::zero();
  const auto add = [&](R values) { differences = differences + (values - values); };
  int64_t d = 0;
  for (; d + R::kWidth <= dim; d += R::kWidth) add(R::load(x + d));
  if (d < dim) {
    T rest[R::kWidth] = {};
    std::copy(x + d, x + dim, rest);
    add(R::load(rest));
  }
  return sum_of(differences) == 0;
}

// Applies the invariant of attention.h to the key and the value of a token, [dim] each.
template <class T>
VLORA_INLINE void mark_not_finite(T* key, T* value, int64_t dim) {
  if (is_finite(key, dim) && is_finite(value, dim)) return;
  const float nan = NAN;
  convert(&nan, 1, key);
  std::fill(value, value + dim, T(0));
}

// The key and the value of a row of the step as they are stored, for one head.
template <class T>
struct Stored {
  T key[kMaxDim], value[kMaxDim];

  VLORA_INLINE Stored(const Problem& p, int64_t row, int64_t head) {
    const int64_t dim = p.plan->layout.dim, half = dim / 2;
    const float* const from = p.q + row * p.q_stride + (p.plan->heads + head) * dim;
    float rotated[kMaxDim];
    rotate(from, p.cosines + row * half, p.sines + row * half, half, 1.0f, rotated);
    convert(rotated, dim, key);
    convert(from + p.plan->layout.kv_heads * dim, dim, value);
    mark_not_finite(key, value, dim);
  }
};

// The place of a position's key and value in the pages, for one head of keys and values.
template <class T>
struct Slot {
  T *keys, *values;  // their panels
  int64_t lane;

  Slot(const Problem& p, const Chunk& chunk, int64_t position, int64_t head) {
    const Layout& layout = p.plan->layout;
    const int64_t slot = position % layout.block;
    keys = reinterpret_cast<T*>(p.cache) +
           p.plan->pages[size_t(chunk.first_page + position / layout.block)] * layout.page +
           slot / kLanes * layout.panel() + head * layout.head();
    values = keys + layout.values();
    lane = slot % kLanes;
  }
};

// Prefetches the lines of a page to which a key is written.
template <class T>
VLORA_INLINE void prefetch_key(const Layout& layout, const Slot<T>& to) {
  constexpr int kPair = int(4 / sizeof(T));
  for (int64_t d = 0; d < layout.dim; d += kPair) __builtin_prefetch(to.keys + d * kLanes, 1);
}

// Prefetches the lines to which the values of `rows` tokens are written, from `to` on.
template <class T>
VLORA_INLINE void prefetch_values(const Layout& layout, const Slot<T>& to, int64_t rows) {
  constexpr int64_t kPair = int64_t(4 / sizeof(T)), kStep = int64_t(64 / sizeof(T));
  const int64_t until = ceil_div(to.lane + rows, kPair) * kPair * layout.padded();
  for (int64_t i = to.lane / kPair * kPair * layout.padded(); i < until; i += kStep)
    __builtin_prefetch(to.values + i, 1);
}

// Writes a key to its column of a panel.
template <class T>
VLORA_INLINE void write_key(const Layout& layout, const Stored<T>& row, const Slot<T>& to) {
  // Number of a token's values that are contiguous in memory.
  constexpr int kPair = int(4 / sizeof(T));
  for (int64_t d = 0; d < layout.dim; d += kPair)
    std::memcpy(to.keys + d * kLanes + to.lane * kPair, row.key + d, 4);
}

template <class T>
VLORA_INLINE void write_value(const Layout& layout, const Stored<T>& row, const Slot<T>& to) {
  const int64_t dim = layout.dim, padded = layout.padded();
  if constexpr (sizeof(T) == 4) {
    std::memcpy(to.values + to.lane * padded, row.value, size_t(dim) * sizeof(T));
  } else {
    // The value is one half of each pair. The other half belongs to the neighbouring token.
    using Pair __attribute__((may_alias)) = uint32_t;
    Pair* const pairs = reinterpret_cast<Pair*>(to.values + to.lane / 2 * 2 * padded);
    const int shift = to.lane % 2 * 16;
    const uint32_t other_half = 0xffff0000u >> shift;
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d)
      pairs[d] = (pairs[d] & other_half) | uint32_t(row.value[d]) << shift;
  }
}

// Transposes 16 contiguous keys into a panel. Each line holds one value, or one pair of values, of
// all tokens.
template <class T, class Register = R>
VLORA_INLINE void transpose_keys(const T* keys, int64_t dim, T* panel) {
  constexpr int kPair = int(4 / sizeof(T));
  int64_t d = 0;
  if constexpr (Register::kWidth == kLanes) {
    for (; d + 4 * kPair <= dim; d += 4 * kPair) {
      Register lines[4];
      Register::transpose(reinterpret_cast<const float*>(keys + d), dim / kPair, 0, lines);
      for (int i = 0; i < 4; ++i)
        lines[i].store(reinterpret_cast<float*>(panel + d * kLanes) + i * kLanes);
    }
  }
  for (; d < dim; d += kPair)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      std::memcpy(panel + d * kLanes + lane * kPair, keys + lane * dim + d, 4);
}

// Writes keys and values of all heads of 16 rows, which fill a panel. Rows are read one by one, in
// the order of memory. Keys are written head by head, in the order of the page.
template <class T>
void write_panel(const Problem& p, const Written& w) {
  const Layout& layout = p.plan->layout;
  const Chunk& chunk = p.plan->chunks[size_t(w.chunk)];
  const int64_t dim = layout.dim, half = dim / 2, padded = layout.padded(),
                kv_heads = layout.kv_heads;
  static thread_local runtime::Scratch scratch;
  T* const keys = reinterpret_cast<T*>(scratch.get(kLanes * kv_heads * dim));  // [heads][rows][dim]
  const Slot<T> to(p, chunk, chunk.start + w.row, 0);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t row = chunk.row + w.row + lane;
    const float* x = p.q + row * p.q_stride + p.plan->heads * dim;
    for (int64_t head = 0; head < kv_heads; ++head, x += dim) {
      float key[kMaxDim];
      rotate(x, p.cosines + row * half, p.sines + row * half, half, 1.0f, key);
      convert(key, dim, keys + (head * kLanes + lane) * dim);
    }
    if constexpr (sizeof(T) == 4) {
      for (int64_t head = 0; head < kv_heads; ++head, x += dim) {
        T* const value = to.values + head * layout.head() + lane * padded;
        convert(x, dim, value);
        mark_not_finite(keys + (head * kLanes + lane) * dim, value, dim);
      }
    } else if (lane % 2) {
      // The values of two rows form pairs.
      for (int64_t head = 0; head < kv_heads; ++head, x += dim) {
        T value[2][kMaxDim];
        for (int i = 0; i < 2; ++i) {
          convert(x + (i - 1) * p.q_stride, dim, value[i]);
          mark_not_finite(keys + (head * kLanes + lane + i - 1) * dim, value[i], dim);
        }
        using Pair __attribute__((may_alias)) = uint32_t;
        Pair* const pairs =
            reinterpret_cast<Pair*>(to.values + head * layout.head() + (lane - 1) * padded);
        for (int64_t d = 0; d < dim; ++d) pairs[d] = value[0][d] | uint32_t(value[1][d]) << 16;
      }
    }
  }
  for (int64_t head = 0; head < kv_heads; ++head)
    transpose_keys(keys + head * kLanes * dim, dim, to.keys + head * layout.head());
}

// Writes keys and values of rows that belong to one panel of each head.
template <class T>
void write(const Problem& p, const Written& w) {
  const Layout& layout = p.plan->layout;
  const Chunk& chunk = p.plan->chunks[size_t(w.chunk)];
  if (w.rows == kLanes) return write_panel<T>(p, w);
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    Slot<T> to(p, chunk, chunk.start + w.row, head);
    // Each store waits for its cache line, so the lines of the next head are prefetched early.
    if (head + 1 < layout.kv_heads) {
      const Slot<T> next(p, chunk, chunk.start + w.row, head + 1);
      prefetch_key(layout, next);
      prefetch_values(layout, next, w.rows);
    }
    for (int64_t row = 0; row < w.rows; ++row, ++to.lane) {
      const Stored<T> stored(p, chunk.row + w.row + row, head);
      write_key(layout, stored, to);
      write_value(layout, stored, to);
    }
  }
}

}  // namespace vlora::attention::VLORA_ISA

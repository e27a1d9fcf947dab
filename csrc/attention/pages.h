// Keys and values on their way into the pages, for one instruction set.
#pragma once

#include <cstring>

#include "attention/attention.h"
#include "runtime/scratch.h"

namespace vlora::attention::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// to: x[i] and x[i + half] turned by the angle of i, times `scale`.
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

// x: [dim] fp32 → as it is stored.
template <class T>
VLORA_INLINE void narrow(const float* x, int64_t dim, T* to) {
  int64_t d = 0;
  for (; d + R::kWidth <= dim; d += R::kWidth) R::load(x + d).store(to + d);
  if (d == dim) return;
  float rest[R::kWidth] = {};
  T narrowed[R::kWidth];
  for (int64_t i = d; i < dim; ++i) rest[i - d] = x[i];
  R::load(rest).store(narrowed);
  for (int64_t i = d; i < dim; ++i) to[i] = narrowed[i - d];
}

// Two rows of values, x: [dim] each, to pairs of bf16.
VLORA_INLINE void join(const float* first, const float* second, int64_t dim, uint16_t* to) {
  uint16_t narrowed[2][kMostDim];
  narrow(first, dim, narrowed[0]);
  narrow(second, dim, narrowed[1]);
  using Pair __attribute__((may_alias)) = uint32_t;
  Pair* const pairs = reinterpret_cast<Pair*>(to);
  for (int64_t d = 0; d < dim; ++d) pairs[d] = narrowed[0][d] | uint32_t(narrowed[1][d]) << 16;
}

// Where a position's key, and its value, of a head of keys and values lie.
template <class T>
struct Slot {
  T *keys, *values;  // of its panel
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

// The key of a row of the step, rotated, into its column of a panel.
template <class T>
VLORA_INLINE void write_key(const Problem& p, int64_t row, int64_t head, const Slot<T>& to) {
  constexpr int kPair = int(4 / sizeof(T));  // depths of a token side by side
  const int64_t dim = p.plan->layout.dim, half = dim / 2;
  float key[kMostDim];
  T narrowed[kMostDim];
  rotate(p.q + row * p.q_stride + (p.plan->heads + head) * dim, p.cosines + row * half,
         p.sines + row * half, half, 1.0f, key);
  narrow(key, dim, narrowed);
  for (int64_t d = 0; d < dim; d += kPair)
    std::memcpy(to.keys + d * kLanes + to.lane * kPair, narrowed + d, 4);
}

template <class T>
VLORA_INLINE void write_value(const Problem& p, int64_t row, int64_t head, const Slot<T>& to) {
  const Layout& layout = p.plan->layout;
  const int64_t at = p.plan->heads + layout.kv_heads + head, padded = layout.padded();
  const float* const value = p.q + row * p.q_stride + at * layout.dim;
  if constexpr (sizeof(T) == 4) {
    narrow(value, layout.dim, to.values + to.lane * padded);
  } else {
    // Its half of each pair; the other one is its neighbour's.
    using Pair __attribute__((may_alias)) = uint32_t;
    T narrowed[kMostDim];
    narrow(value, layout.dim, narrowed);
    Pair* const pairs = reinterpret_cast<Pair*>(to.values + to.lane / 2 * 2 * padded);
    const int shift = to.lane % 2 * 16;
    const uint32_t others = 0xffff0000u >> shift;
    const int64_t dim = layout.dim;
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d) pairs[d] = (pairs[d] & others) | uint32_t(narrowed[d]) << shift;
  }
}

// A panel of keys from 16 of them, side by side: pairs of depth, or depths, of all tokens in a line.
template <class T, class Register = R>
VLORA_INLINE void turn_keys(const T* keys, int64_t dim, T* panel) {
  constexpr int kPair = int(4 / sizeof(T));
  int64_t d = 0;
  if constexpr (Register::kWidth == kLanes) {
    for (; d + 4 * kPair <= dim; d += 4 * kPair) {
      Register lines[4];
      Register::turned(reinterpret_cast<const float*>(keys + d), dim / kPair, 0, lines);
      for (int i = 0; i < 4; ++i) lines[i].store(reinterpret_cast<float*>(panel + d * kLanes) + i * kLanes);
    }
  }
  for (; d < dim; d += kPair)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      std::memcpy(panel + d * kLanes + lane * kPair, keys + lane * dim + d, 4);
}

// Keys and values of all heads of 16 rows that fill a panel: row by row, as they lie in memory, on the way
// in, and page by page on the way out.
template <class T>
void write_panel(const Problem& p, const Written& w) {
  const Layout& layout = p.plan->layout;
  const Chunk& chunk = p.plan->chunks[size_t(w.chunk)];
  const int64_t dim = layout.dim, half = dim / 2, padded = layout.padded(), kv_heads = layout.kv_heads;
  static thread_local runtime::Scratch scratch;
  T* const keys = reinterpret_cast<T*>(scratch.get(kLanes * kv_heads * dim));  // [heads][rows][dim]
  const Slot<T> to(p, chunk, chunk.start + w.row, 0);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t row = chunk.row + w.row + lane;
    const float* x = p.q + row * p.q_stride + p.plan->heads * dim;
    for (int64_t head = 0; head < kv_heads; ++head, x += dim) {
      float key[kMostDim];
      rotate(x, p.cosines + row * half, p.sines + row * half, half, 1.0f, key);
      narrow(key, dim, keys + (head * kLanes + lane) * dim);
    }
    if constexpr (sizeof(T) == 4) {
      for (int64_t head = 0; head < kv_heads; ++head, x += dim)
        narrow(x, dim, to.values + head * layout.head() + lane * padded);
    } else if (lane % 2) {
      // Two rows' values are pairs.
      for (int64_t head = 0; head < kv_heads; ++head, x += dim)
        join(x - p.q_stride, x, dim, to.values + head * layout.head() + (lane - 1) * padded);
    }
  }
  for (int64_t head = 0; head < kv_heads; ++head)
    turn_keys(keys + head * kLanes * dim, dim, to.keys + head * layout.head());
}

// Keys and values of rows whose place is in one panel of each head.
template <class T>
void write(const Problem& p, const Written& w) {
  const Layout& layout = p.plan->layout;
  const Chunk& chunk = p.plan->chunks[size_t(w.chunk)];
  if (w.rows == kLanes) return write_panel<T>(p, w);
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    Slot<T> to(p, chunk, chunk.start + w.row, head);
    // Stores wait for their lines one by one: those of the next head are asked for meanwhile.
    const char* const next = reinterpret_cast<const char*>(to.keys + layout.head());
    if (head + 1 < layout.kv_heads) {
      for (int64_t d = 0; d < layout.dim; ++d)
        __builtin_prefetch(next + d * ptrdiff_t(kLanes * sizeof(T)), 1);
      const int64_t until = (to.lane + w.rows) * layout.padded();
      for (int64_t at = to.lane / 2 * 2 * layout.padded(); at < until; at += 64 / ptrdiff_t(sizeof(T)))
        __builtin_prefetch(to.values + layout.head() + at, 1);
    }
    for (int64_t row = 0; row < w.rows; ++row, ++to.lane) {
      write_key<T>(p, chunk.row + w.row + row, head, to);
      write_value<T>(p, chunk.row + w.row + row, head, to);
    }
  }
}

}  // namespace vlora::attention::VLORA_ISA

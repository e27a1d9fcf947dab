// Attention's inner loops for one instruction set.
#pragma once

#include <cmath>

#include "attention/attention.h"

namespace vlora::attention::VLORA_ISA {

using namespace vlora::cpu::VLORA_ISA;

constexpr int kRegisters = kLanes / R::kWidth;  // of a panel
constexpr int64_t kScoreStride = kBlockPanels * kLanes;


// Scores of a panel's tokens: M queries (`stride` apart) times [dim][kLanes]. fetch: as many bytes
// from there are asked for meanwhile.
template <class T, int M>
VLORA_INLINE void score(const float* q, ptrdiff_t stride, const T* keys, int64_t dim, float* scores,
                        const char* fetch) {
  R acc[M][kRegisters];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kRegisters; ++n) acc[m][n] = R::zero();
  for (int64_t d = 0; d < dim; ++d) {
    R b[kRegisters];
    __builtin_prefetch(fetch + d * ptrdiff_t(kLanes * sizeof(T)), 0, 2);
#pragma GCC unroll 4
    for (int n = 0; n < kRegisters; ++n) b[n] = R::load(keys + d * kLanes + n * R::kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(q + m * stride + d);
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n) acc[m][n].add_product(s, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < kRegisters; ++n) acc[m][n].store(scores + m * kScoreStride + n * R::kWidth);
}

// Panels of values with the tokens of each that count.
template <class T>
struct Values {
  const T* at[kBlockPanels];
  const char* fetch[kBlockPanels];
  int count[kBlockPanels];
  int panels;
};

// out += weights times values, M rows by N registers of columns.
template <class T, int M, int N, bool kFetch>
VLORA_INLINE void add_values(const float* weights, const Values<T>& values, int64_t column,
                             int64_t padded, float* out) {
  R acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = R::load(out + m * padded + column + n * R::kWidth);
  for (int panel = 0; panel < values.panels; ++panel) {
    const T* v = values.at[panel] + column;
    const float* w = weights + panel * kLanes;
    const char* fetch = values.fetch[panel];
    for (int t = 0; t < values.count[panel]; ++t, v += padded) {
      if constexpr (kFetch) {
        const ptrdiff_t row = padded * ptrdiff_t(sizeof(T));
        for (ptrdiff_t line = 0; line < row; line += 64) __builtin_prefetch(fetch + t * row + line, 0, 2);
      }
      R b[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) b[n] = R::load(v + n * R::kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const R s = R::broadcast(w + m * kScoreStride + t);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n].store(out + m * padded + column + n * R::kWidth);
}

// As many columns at a time as fill the registers.
template <class T, int M>
VLORA_INLINE void add_all_values(const float* weights, const Values<T>& values, int64_t padded,
                                 float* out, bool fetch) {
  constexpr int kWide = (M == 1 ? 4 : M <= 3 ? 2 : 1) * kRegisters;
  int64_t column = 0;
  for (; column + kWide * R::kWidth <= padded; column += kWide * R::kWidth) {
    if (fetch && column == 0) {
      add_values<T, M, kWide, true>(weights, values, column, padded, out);
    } else {
      add_values<T, M, kWide, false>(weights, values, column, padded, out);
    }
  }
  for (; column < padded; column += kLanes)
    add_values<T, M, kRegisters, false>(weights, values, column, padded, out);
}

constexpr int kTileItems = 6;

template <class T, int M = kTileItems>
VLORA_INLINE void score_some(int64_t items, const float* q, ptrdiff_t stride, const T* keys,
                             int64_t dim, float* scores, const char* fetch) {
  if (items >= M) return score<T, M>(q, stride, keys, dim, scores, fetch);
  if constexpr (M > 1) score_some<T, M - 1>(items, q, stride, keys, dim, scores, fetch);
}

template <class T, int M = kTileItems>
VLORA_INLINE void add_some_values(int64_t items, const float* weights, const Values<T>& values,
                                  int64_t padded, float* out, bool fetch) {
  if (items >= M) return add_all_values<T, M>(weights, values, padded, out, fetch);
  if constexpr (M > 1) add_some_values<T, M - 1>(items, weights, values, padded, out, fetch);
}

// One item's scores of a block to weights; its earlier sums are scaled to the new maximum.
VLORA_INLINE void soften(float* scores, int64_t valid, int64_t slots, float& most, float& sum,
                         float* out, int64_t padded) {
  for (int64_t i = valid; i < slots; ++i) scores[i] = -INFINITY;
  R high = R::all(most);
  for (int64_t i = 0; i < slots; i += R::kWidth) high = max(high, R::load(scores + i));
  const float now = high.largest();
  if (now == -INFINITY) {
    for (int64_t i = 0; i < slots; ++i) scores[i] = 0;
    return;
  }
  const R level = R::all(now);
  R total = R::zero();
  for (int64_t i = 0; i < slots; i += R::kWidth) {
    const R weight = exponential(R::load(scores + i) - level);
    weight.store(scores + i);
    if (i + R::kWidth > valid) {
      for (int64_t j = valid > i ? valid : i; j < i + R::kWidth; ++j) scores[j] = 0;
    }
    total = total + R::load(scores + i);
  }
  const float correction = most == -INFINITY ? 0 : std::exp(most - now);
  sum = sum * correction + sum_of(total);
  if (correction != 1) {
    const R factor = R::all(correction);
    for (int64_t d = 0; d < padded; d += R::kWidth) (R::load(out + d) * factor).store(out + d);
  }
  most = now;
}

template <class T>
void attend(const Problem& p, const Piece& piece, float* scratch, float* partial) {
  const Plan& plan = *p.plan;
  const Layout& layout = plan.layout;
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  const int64_t group = plan.heads / layout.kv_heads, items = piece.rows * group;
  const int64_t dim = layout.dim, padded = layout.padded(), per_page = layout.panels();
  const int64_t first_position = chunk.start + piece.row;
  float* const q = scratch;
  float* const scores = q + plan.items() * padded;
  float* const own = scores + plan.items() * kScoreStride;
  float* const most = partial ? partial : own;
  float* const sum = most + plan.items();
  float* const out = sum + plan.items();
  const R scale = R::all(p.scale);
  for (int64_t i = 0; i < items; ++i) {
    const float* from = p.q + (chunk.row + piece.row + i / group) * p.q_stride +
                        (piece.kv_head * group + i % group) * dim;
    float* to = q + i * padded;
    int64_t d = 0;
    for (; d + R::kWidth <= dim; d += R::kWidth) (R::load(from + d) * scale).store(to + d);
    for (; d < dim; ++d) to[d] = from[d] * p.scale;
    for (d = 0; d < padded; ++d) out[i * padded + d] = 0;
    most[i] = -INFINITY;
    sum[i] = 0;
  }
  const int32_t* pages = plan.pages.data() + chunk.first_page;
  const T* const base = reinterpret_cast<const T*>(p.cache) + piece.kv_head * layout.head();
  const auto keys_of = [&](int64_t panel) {
    return base + pages[panel / per_page] * layout.page + panel % per_page * layout.panel();
  };
  const int64_t last = piece.panel + piece.panels;
  for (int64_t begin = piece.panel; begin < last; begin += kBlockPanels) {
    const int64_t count = last - begin < kBlockPanels ? last - begin : kBlockPanels;
    Values<T> values;
    values.panels = int(count);
    int64_t position[kBlockPanels];
    int room[kBlockPanels];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t panel = begin + j, part = panel % per_page;
      const T* keys = keys_of(panel);
      values.at[j] = keys + layout.values();
      const int64_t later = panel + kBlockPanels < last ? panel + kBlockPanels : panel;
      values.fetch[j] = reinterpret_cast<const char*>(keys_of(later));
      position[j] = panel / per_page * layout.block + part * kLanes;
      room[j] = int(layout.block - part * kLanes < kLanes ? layout.block - part * kLanes : kLanes);
      // What the last row sees: beyond lies what may be another sequence's.
      const int64_t seen = first_position + piece.rows - position[j];
      values.count[j] = int(seen < 0 ? 0 : seen < room[j] ? seen : room[j]);
      for (int64_t i = 0; i < items; i += kTileItems)
        score_some<T>(items - i, q + i * padded, padded, keys, dim,
                      scores + i * kScoreStride + j * kLanes,
                      reinterpret_cast<const char*>(values.at[j]));
    }
    const int64_t slots = count * kLanes;
    for (int64_t i = 0; i < items; ++i) {
      const int64_t at = first_position + i / group;
      float* row = scores + i * kScoreStride;
      int64_t valid = slots;
      if (at < position[count - 1] + kLanes - 1 || layout.block % kLanes) {
        // Slots that hold nothing, or what comes later, are left out.
        valid = 0;
        for (int64_t j = 0; j < count; ++j) {
          const int64_t seen = at + 1 - position[j];
          const int64_t here = seen < 0 ? 0 : seen < room[j] ? seen : room[j];
          if (here > 0) valid = j * kLanes + here;
          if (here < kLanes && j + 1 < count)
            for (int64_t s = here; s < kLanes; ++s) row[j * kLanes + s] = -INFINITY;
        }
      }
      soften(row, valid, slots, most[i], sum[i], out + i * padded, padded);
    }
    for (int64_t i = 0; i < items; i += kTileItems)
      add_some_values<T>(items - i, scores + i * kScoreStride, values, padded, out + i * padded, i == 0);
  }
  if (partial) return;
  for (int64_t i = 0; i < items; ++i) {
    float* to = p.y + (chunk.row + piece.row + i / group) * p.y_stride +
                (piece.kv_head * group + i % group) * dim;
    const float inverse = 1 / sum[i];
    for (int64_t d = 0; d < dim; ++d) to[d] = out[i * padded + d] * inverse;
  }
}

VLORA_INLINE void narrow(float value, float* to) { *to = value; }
VLORA_INLINE void narrow(float value, uint16_t* to) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  *to = uint16_t((nan ? bits | 0x00400000u : bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// x[i] and x[i + half] turned by the angle of i.
VLORA_INLINE void rotate(float* x, const float* cosines, const float* sines, int64_t half) {
  int64_t i = 0;
  for (; i + R::kWidth <= half; i += R::kWidth) {
    const R a = R::load(x + i), b = R::load(x + half + i);
    const R c = R::load(cosines + i), s = R::load(sines + i);
    (a * c - b * s).store(x + i);
    (b * c + a * s).store(x + half + i);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosines[i] - b * sines[i];
    x[half + i] = b * cosines[i] + a * sines[i];
  }
}

// Rows [from, until) of a chunk.
template <class T>
void write(const Writing& w, const Chunk& chunk, int64_t from, int64_t until) {
  const Plan& plan = *w.plan;
  const Layout& layout = plan.layout;
  const int64_t dim = layout.dim, half = dim / 2, padded = layout.padded();
  for (int64_t row = from; row < until; ++row) {
    const int64_t position = chunk.start + row - chunk.row, slot = position % layout.block;
    T* const page = reinterpret_cast<T*>(w.cache) +
                    plan.pages[size_t(chunk.first_page + position / layout.block)] * layout.page +
                    slot / kLanes * layout.panel();
    float* const x = w.q + row * w.q_stride;
    const float* const cosines = w.cosines + row * half;
    const float* const sines = w.sines + row * half;
    for (int64_t head = 0; head < plan.heads + layout.kv_heads; ++head)
      rotate(x + head * dim, cosines, sines, half);
    for (int64_t head = 0; head < layout.kv_heads; ++head) {
      const float* const key = x + (plan.heads + head) * dim;
      const float* const value = key + layout.kv_heads * dim;
      T* const keys = page + head * layout.head() + slot % kLanes;
      T* const values = page + head * layout.head() + layout.values() + slot % kLanes * padded;
      for (int64_t d = 0; d < dim; ++d) narrow(key[d], keys + d * kLanes);
      for (int64_t d = 0; d < dim; ++d) narrow(value[d], values + d);
    }
  }
}

}  // namespace vlora::attention::VLORA_ISA

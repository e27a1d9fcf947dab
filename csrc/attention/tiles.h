// Attention's inner loops for one instruction set.
#pragma once

#include <cmath>

#include "attention/attention.h"

namespace vlora::attention::VLORA_ISA {

using namespace vlora::cpu::VLORA_ISA;

constexpr int kRegisters = kLanes / R::kWidth;  // of a panel
constexpr int64_t kAhead = 8, kAheadBytes = 8192;
constexpr int64_t kScoreStride = kBlockPanels * kLanes;

// Whether bf16 is widened by pairs of registers, those of even places and those of odd ones, which
// takes half the work. Sums over values then lie in that order until they are done.
template <class T>
constexpr bool kPaired = sizeof(T) == 2 && kRegisters % 2 == 0;

template <class T, int N>
VLORA_INLINE void load(const T* p, R (&to)[N]) {
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    if constexpr (kPaired<T>) {
      const T* const pair = p + n / 2 * 2 * R::kWidth;
      to[n] = n % 2 ? R::odd(pair) : R::even(pair);
    } else {
      to[n] = R::load(p + n * R::kWidth);
    }
  }
}

// From the order of `load` to that of what was loaded.
template <class T, int N>
VLORA_INLINE void in_order(R (&r)[N]) {
  if constexpr (kPaired<T>) {
#pragma GCC unroll 8
    for (int n = 0; n + 1 < N; n += 2) R::interleave(r[n], r[n + 1]);
  }
}

// Scores of a panel's tokens: M queries (`stride` apart) times [dim][kLanes]. fetch: null, or as many
// bytes from there are asked for meanwhile. Few queries have several sums each, since a sum waits for
// the one before.
template <class T, int M, bool kFetch>
VLORA_INLINE void score(const float* q, ptrdiff_t stride, const T* keys, int64_t dim, float* scores,
                        const char* fetch) {
  constexpr int kSums = M == 1 ? 4 : M <= 3 ? 2 : 1;
  R acc[kSums][M][kRegisters];
#pragma GCC unroll 4
  for (int k = 0; k < kSums; ++k)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n) acc[k][m][n] = R::zero();
  constexpr int kSteps = kSums > 1 ? kSums : 2;  // of depth, at a time: whole cache lines
  const auto add = [&](int k, int64_t d) __attribute__((always_inline)) {
    R b[kRegisters];
    load(keys + d * kLanes, b);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(q + m * stride + d);
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n) acc[k][m][n].add_product(s, b[n]);
    }
  };
  int64_t d = 0;
  for (; d + kSteps <= dim; d += kSteps) {
    constexpr ptrdiff_t kRow = kLanes * sizeof(T);
#pragma GCC unroll 4
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (kFetch)
        if (k * kRow % 64 == 0) __builtin_prefetch(fetch + (d + k) * kRow);
      add(k % kSums, d + k);
    }
  }
  for (; d < dim; ++d) add(0, d);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    R sum[kRegisters];
#pragma GCC unroll 4
    for (int n = 0; n < kRegisters; ++n) {
      sum[n] = acc[0][m][n];
#pragma GCC unroll 4
      for (int k = 1; k < kSums; ++k) sum[n] = sum[n] + acc[k][m][n];
    }
    in_order<T>(sum);
#pragma GCC unroll 4
    for (int n = 0; n < kRegisters; ++n) sum[n].store(scores + m * kScoreStride + n * R::kWidth);
  }
}

// Panels of values with the tokens of each that count.
template <class T>
struct Values {
  const T* at[kBlockPanels];
  int count[kBlockPanels];
  int panels;
};

// out += weights times values, M rows by N registers of columns. fetch: as of score, for one panel.
template <class T, int M, int N, bool kFetch>
VLORA_INLINE void add_values(const float* weights, const Values<T>& values, int64_t column,
                             int64_t padded, float* out, const char* fetch) {
  R acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = R::load(out + m * padded + column + n * R::kWidth);
  for (int panel = 0; panel < values.panels; ++panel) {
    const T* v = values.at[panel] + column;
    const float* w = weights + panel * kLanes;
#pragma GCC unroll 2
    for (int t = 0; t < values.count[panel]; ++t, v += padded) {
      if constexpr (kFetch) {
        const char* const at = fetch + (t * padded + column) * ptrdiff_t(sizeof(T));
#pragma GCC unroll 8
        for (size_t line = 0; line < N * R::kWidth * sizeof(T); line += 64) __builtin_prefetch(at + line);
      }
      R b[N];
      load(v, b);
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
                                 float* out, const char* fetch) {
  constexpr int kWide = (M == 1 ? 4 : M <= 3 ? 2 : 1) * kRegisters;
  int64_t column = 0;
  for (; column + kWide * R::kWidth <= padded; column += kWide * R::kWidth)
    fetch ? add_values<T, M, kWide, true>(weights, values, column, padded, out, fetch)
          : add_values<T, M, kWide, false>(weights, values, column, padded, out, nullptr);
  for (; column < padded; column += kLanes)
    add_values<T, M, kRegisters, false>(weights, values, column, padded, out, nullptr);
}

template <class T, int M = kTileItems>
VLORA_INLINE void score_some(int64_t items, const float* q, ptrdiff_t stride, const T* keys,
                             int64_t dim, float* scores, const char* fetch) {
  if (items >= M)
    return fetch ? score<T, M, true>(q, stride, keys, dim, scores, fetch)
                 : score<T, M, false>(q, stride, keys, dim, scores, nullptr);
  if constexpr (M > 1) score_some<T, M - 1>(items, q, stride, keys, dim, scores, fetch);
}

template <class T, int M = kTileItems>
VLORA_INLINE void add_some_values(int64_t items, const float* weights, const Values<T>& values,
                                  int64_t padded, float* out, const char* fetch) {
  if (items >= M) return add_all_values<T, M>(weights, values, padded, out, fetch);
  if constexpr (M > 1) add_some_values<T, M - 1>(items, weights, values, padded, out, fetch);
}

// One item's scores, the first `valid` of them, to weights, the others up to `slots` to zeros; its
// earlier sums are scaled to the new maximum.
VLORA_INLINE void soften(float* scores, int64_t valid, int64_t slots, float& most, float& sum,
                         float* out, int64_t padded) {
  const int64_t used = ceil_div(valid, int64_t(R::kWidth)) * R::kWidth;
  for (int64_t i = used; i < slots; ++i) scores[i] = 0;
  for (int64_t i = valid; i < used; ++i) scores[i] = -INFINITY;
  R high = R::all(most);
  for (int64_t i = 0; i < used; i += R::kWidth) high = max(high, R::load(scores + i));
  const float now = high.largest();
  if (now == -INFINITY) {
    for (int64_t i = 0; i < used; ++i) scores[i] = 0;
    return;
  }
  const R level = R::all(now);
  R total = R::zero();
  for (int64_t i = 0; i + R::kWidth <= valid; i += R::kWidth) {
    const R weight = exponential(R::load(scores + i) - level);
    weight.store(scores + i);
    total = total + weight;
  }
  if (valid < used) {
    float* const rest = scores + used - R::kWidth;
    exponential(R::load(rest) - level).store(rest);
    for (int64_t i = valid; i < used; ++i) scores[i] = 0;
    total = total + R::load(rest);
  }
  const float correction =
      most == -INFINITY ? 0 : most == now ? 1 : exponential(R::all(most - now)).largest();
  sum = sum * correction + sum_of(total);
  if (correction != 1) {
    const R factor = R::all(correction);
    for (int64_t d = 0; d < padded; d += R::kWidth) (R::load(out + d) * factor).store(out + d);
  }
  most = now;
}

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

// Where a position's key, and its value, of a head of keys and values lie.
template <class T>
struct Slot {
  T *key, *value;

  Slot(const Problem& p, const Chunk& chunk, int64_t position, int64_t head) {
    const Layout& layout = p.plan->layout;
    const int64_t slot = position % layout.block;
    T* const panel = reinterpret_cast<T*>(p.cache) +
                     p.plan->pages[size_t(chunk.first_page + position / layout.block)] * layout.page +
                     slot / kLanes * layout.panel() + head * layout.head();
    key = panel + slot % kLanes;
    value = panel + layout.values() + slot % kLanes * layout.padded();
  }
};

// The key of a row of the step, rotated, into its column of a panel.
template <class T>
VLORA_INLINE void write_key(const Problem& p, int64_t row, int64_t head, T* to) {
  const int64_t dim = p.plan->layout.dim, half = dim / 2;
  float key[kMostDim];
  T narrowed[kMostDim];
  rotate(p.q + row * p.q_stride + (p.plan->heads + head) * dim, p.cosines + row * half,
         p.sines + row * half, half, 1.0f, key);
  narrow(key, dim, narrowed);
  for (int64_t d = 0; d < dim; ++d) to[d * kLanes] = narrowed[d];
}

template <class T>
VLORA_INLINE void write_value(const Problem& p, int64_t row, int64_t head, T* to) {
  const Layout& layout = p.plan->layout;
  const int64_t at = p.plan->heads + layout.kv_heads + head;
  narrow(p.q + row * p.q_stride + at * layout.dim, layout.dim, to);
}

// Keys and values of rows whose place is in one panel of each head.
template <class T>
void write(const Problem& p, const Written& w) {
  const Layout& layout = p.plan->layout;
  const Chunk& chunk = p.plan->chunks[size_t(w.chunk)];
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    const Slot<T> to(p, chunk, chunk.start + w.row, head);
    // Stores wait for their lines one by one: those of the next head are asked for meanwhile.
    const char* const next = reinterpret_cast<const char*>(to.key + layout.head());
    if (head + 1 < layout.kv_heads) {
      for (int64_t d = 0; d < layout.dim; ++d)
        __builtin_prefetch(next + d * ptrdiff_t(kLanes * sizeof(T)), 1);
      for (int64_t at = 0; at < w.rows * layout.padded(); at += 64 / ptrdiff_t(sizeof(T)))
        __builtin_prefetch(to.value + layout.head() + at, 1);
    }
    for (int64_t row = 0; row < w.rows; ++row) {
      write_key<T>(p, chunk.row + w.row + row, head, to.key + row);
      write_value<T>(p, chunk.row + w.row + row, head, to.value + row * layout.padded());
    }
  }
}

// One item's values, times `factor`, to where they belong.
template <class T>
VLORA_INLINE void finish(const float* values, float factor, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    R r[kRegisters];
#pragma GCC unroll 4
    for (int n = 0; n < kRegisters; ++n) r[n] = R::load(values + d + n * R::kWidth) * R::all(factor);
    in_order<T>(r);
    float some[kLanes];
    float* const all = d + kLanes <= dim ? to + d : some;
#pragma GCC unroll 4
    for (int n = 0; n < kRegisters; ++n) r[n].store(all + n * R::kWidth);
    if (all == some)
      for (int64_t i = d; i < dim; ++i) to[i] = some[i - d];
  }
}

// Items of a piece are those of its first head of keys and values, row by row, then of the next.
template <class T>
void attend(const Problem& p, const Piece& piece, float* scratch, float* partial) {
  const Plan& plan = *p.plan;
  const Layout& layout = plan.layout;
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  const int64_t group = plan.heads / layout.kv_heads, of_head = piece.rows * group;
  const int64_t heads = piece.kv_heads, items = of_head * heads;
  const int64_t dim = layout.dim, padded = layout.padded(), per_page = layout.panels();
  const int64_t first_position = chunk.start + piece.row;
  float* const q = scratch;
  float* const scores = q + plan.items() * padded;
  float* const own = scores + plan.items() * kScoreStride;
  float* const most = partial ? partial : own;
  float* const sum = most + plan.items();
  float* const out = sum + plan.items();
  for (int64_t i = 0; i < items; ++i) {
    const int64_t of = chunk.row + piece.row + i % of_head / group;
    const int64_t head = (piece.kv_head + i / of_head) * group + i % group;
    rotate(p.q + of * p.q_stride + head * dim, p.cosines + of * (dim / 2), p.sines + of * (dim / 2),
           dim / 2, p.scale, q + i * padded);
    for (int64_t d = 0; d < padded; ++d) out[i * padded + d] = 0;
    most[i] = -INFINITY;
    sum[i] = 0;
  }
  const int32_t* pages = plan.pages.data() + chunk.first_page;
  const T* const base = reinterpret_cast<const T*>(p.cache) + piece.kv_head * layout.head();
  const auto keys_of = [&](int64_t panel) {
    return base + pages[panel / per_page] * layout.page + panel % per_page * layout.panel();
  };
  // Tiles of one head, of like sizes.
  const int64_t tile = ceil_div(of_head, ceil_div(of_head, int64_t(kTileItems)));
  const int64_t last = piece.panel + piece.panels;
  const bool writes = chunk.length == 1 && piece.last();
  // With several heads a panel at a time, in the order in which they lie in memory.
  const int64_t run = heads > 1 ? 1 : kBlockPanels;
  // So far ahead that what is asked for is there in time.
  const int64_t size = layout.panel() * int64_t(sizeof(T));
  const int64_t ahead = size * kAhead <= kAheadBytes ? kAhead : ceil_div(kAheadBytes, size);
  for (int64_t begin = piece.panel; begin < last; begin += kBlockPanels) {
    const int64_t count = last - begin < kBlockPanels ? last - begin : kBlockPanels;
    const T* keys[kBlockPanels];
    int64_t position[kBlockPanels];
    int room[kBlockPanels];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t panel = begin + j, part = panel % per_page;
      keys[j] = keys_of(panel);
      position[j] = panel / per_page * layout.block + part * kLanes;
      room[j] = int(layout.block - part * kLanes < kLanes ? layout.block - part * kLanes : kLanes);
    }
    // What is read, in its order: keys of all panels and heads, values of all, the next block's keys.
    const T* order[(2 * kBlockPanels * kMostHeads) + kAhead];
    const int64_t steps = count * heads;
    for (int64_t j = 0, step = 0; j < count; ++j)
      for (int64_t h = 0; h < heads; ++h, ++step) {
        order[step] = keys[j] + h * layout.head();
        order[steps + step] = order[step] + layout.values();
      }
    for (int64_t step = 0; step < kAhead; ++step) {
      const int64_t panel = begin + count + step / heads;
      order[2 * steps + step] = panel < last ? keys_of(panel) + step % heads * layout.head() : nullptr;
    }
    // Of each tile of a head: what its last row sees.
    int64_t at[kMostTiles], seen[kMostTiles];
    for (int64_t t = 0; t * tile < of_head; ++t) {
      const int64_t until = (t + 1) * tile < of_head ? (t + 1) * tile : of_head;
      at[t] = first_position + (until - 1) / group;
      seen[t] = count;
      while (seen[t] > 0 && position[seen[t] - 1] > at[t]) --seen[t];
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t h = 0; h < heads; ++h) {
        const T* const* const step = order + j * heads + h;
        const char* fetch = reinterpret_cast<const char*>(step[ahead]);
        if (writes && begin + j == last - 1)
          write_key<T>(p, chunk.row, piece.kv_head + h,
                       Slot<T>(p, chunk, chunk.start, piece.kv_head + h).key);
        for (int64_t t = 0; t * tile < of_head; ++t) {
          if (j >= seen[t]) continue;
          const int64_t i = h * of_head + t * tile, rest = of_head - t * tile;
          score_some<T>(rest < tile ? rest : tile, q + i * padded, padded, *step, dim,
                        scores + i * kScoreStride + j * kLanes, fetch);
          fetch = nullptr;
        }
      }
    }
    for (int64_t i = 0; i < items; ++i) {
      const int64_t own_at = first_position + i % of_head / group, panels = seen[i % of_head / tile];
      float* const row = scores + i * kScoreStride;
      int64_t valid = panels * kLanes;
      if (panels > 0 && (own_at < position[panels - 1] + kLanes - 1 || layout.block % kLanes)) {
        // Slots that hold nothing, or what comes later, are left out.
        valid = 0;
        for (int64_t j = 0; j < panels; ++j) {
          const int64_t until = own_at + 1 - position[j];
          const int64_t here = until < 0 ? 0 : until < room[j] ? until : room[j];
          if (here > 0) valid = j * kLanes + here;
          if (here < kLanes && j + 1 < panels)
            for (int64_t s = here; s < kLanes; ++s) row[j * kLanes + s] = -INFINITY;
        }
      }
      soften(row, valid, panels * kLanes, most[i], sum[i], out + i * padded, padded);
    }
    for (int64_t j = 0; j < count; j += run) {
      for (int64_t h = 0; h < heads; ++h) {
        const T* const* const step = order + steps + j * heads + h;
        const char* fetch = reinterpret_cast<const char*>(run > 1 ? order[2 * steps] : step[ahead]);
        if (writes && begin + j + run >= last)
          write_value<T>(p, chunk.row, piece.kv_head + h,
                         Slot<T>(p, chunk, chunk.start, piece.kv_head + h).value);
        for (int64_t t = 0; t * tile < of_head; ++t) {
          if (j >= seen[t]) continue;
          const int64_t i = h * of_head + t * tile, rest = of_head - t * tile;
          Values<T> values;
          values.panels = int(seen[t] - j < run ? seen[t] - j : run);
          for (int v = 0; v < values.panels; ++v) {
            values.at[v] = step[v * heads];
            // What the last row sees: beyond lies what may be another sequence's.
            const int64_t until = at[t] + 1 - position[j + v];
            values.count[v] = int(until < room[j + v] ? until : room[j + v]);
          }
          add_some_values<T>(rest < tile ? rest : tile, scores + i * kScoreStride + j * kLanes, values, padded,
                             out + i * padded, fetch);
          fetch = nullptr;
        }
      }
    }
  }
  if (partial) return;
  for (int64_t i = 0; i < items; ++i) {
    const int64_t head = (piece.kv_head + i / of_head) * group + i % group;
    float* to = p.y + (chunk.row + piece.row + i % of_head / group) * p.y_stride + head * dim;
    finish<T>(out + i * padded, 1 / sum[i], dim, to);
  }
}

template <class T>
void combine(const Problem& p, const Piece& piece, const float* partials) {
  const Plan& plan = *p.plan;
  const int64_t group = plan.heads / plan.layout.kv_heads, of_head = piece.rows * group;
  const int64_t padded = plan.layout.padded(), dim = plan.layout.dim, size = partial_floats(plan);
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  float found[kMostDim];
  for (int64_t i = 0; i < of_head * piece.kv_heads; ++i) {
    float most = -INFINITY;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float here = partials[part * size + i];
      if (!(here <= most)) most = here;  // a NaN stays
    }
    for (int64_t d = 0; d < padded; d += R::kWidth) R::zero().store(found + d);
    float sum = 0;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float* from = partials + part * size;
      if (from[i] == -INFINITY) continue;
      const R weight = exponential(R::all(from[i] - most));
      sum += weight.largest() * from[plan.items() + i];
      const float* values = from + 2 * plan.items() + i * padded;
      for (int64_t d = 0; d < padded; d += R::kWidth) {
        R value = R::load(found + d);
        value.add_product(weight, R::load(values + d));
        value.store(found + d);
      }
    }
    const int64_t head = (piece.kv_head + i / of_head) * group + i % group;
    float* y = p.y + (chunk.row + piece.row + i % of_head / group) * p.y_stride + head * dim;
    finish<T>(found, 1 / sum, dim, y);
  }
}

}  // namespace vlora::attention::VLORA_ISA

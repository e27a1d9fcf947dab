// Attention's inner loops for one instruction set.
#pragma once

#include <cmath>

#include "attention/attention.h"

namespace vlora::attention::VLORA_ISA {

using namespace vlora::cpu::VLORA_ISA;

constexpr int kRegisters = kLanes / R::kWidth;  // of a panel
constexpr int64_t kAhead = 8, kAheadBytes = 8192;
constexpr int64_t kStreams = 4;
// Panels that are read at once: the machine's own prefetching follows each of them, and brings more than
// one stream by itself or what is asked for line by line.
constexpr int kStreamItems = 2;
// (row, head) pairs that meet values so read: more of a row's columns at a time.
constexpr int64_t kChunkBytes = 512, kChunkTokens = 4;
// Of one panel before the next one's turn.
constexpr float kSlack = 8;
// A new maximum is taken when it is so much over the last one: weights stay under e to this power.
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

// Scores of the tokens of P panels: M queries (`stride` apart) times [dim][kLanes], for the depths
// from … until; later ones are added to what earlier ones left. end: these are the last. fetch: null, or
// as many bytes as a panel has are asked for meanwhile. Where sums are few there are several of each,
// since a sum waits for the one before.
template <class T, int M, int P, bool kFetch>
VLORA_INLINE void score(const float* q, ptrdiff_t stride, const T* const* keys, int64_t from,
                        int64_t until, bool end, float* scores, const char* fetch) {
  constexpr int kSums = M * P == 1 ? 4 : M * P <= 3 ? 2 : 1;
  R acc[kSums][P][M][kRegisters];
#pragma GCC unroll 4
  for (int k = 0; k < kSums; ++k)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < kRegisters; ++n)
          acc[k][p][m][n] = k > 0 || from == 0
                                ? R::zero()
                                : R::load(scores + m * kScoreStride + p * kLanes + n * R::kWidth);
  const T* at[P];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) at[p] = keys[p];
  constexpr int kSteps = kSums > 1 ? kSums : 2;  // of depth, at a time: whole cache lines
  const auto add = [&](int k, int64_t d) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      R b[kRegisters];
      load(at[p] + d * kLanes, b);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const R s = R::broadcast(q + m * stride + d);
#pragma GCC unroll 4
        for (int n = 0; n < kRegisters; ++n) acc[k][p][m][n].add_product(s, b[n]);
      }
    }
  };
  int64_t d = from;
  for (; d + kSteps <= until; d += kSteps) {
    constexpr ptrdiff_t kRow = kLanes * sizeof(T);
#pragma GCC unroll 4
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (kFetch)
        if (k * kRow % 64 == 0) __builtin_prefetch(fetch + (d + k) * kRow);
      add(k % kSums, d + k);
    }
  }
  for (; d < until; ++d) add(0, d);
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      R sum[kRegisters];
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n) {
        sum[n] = acc[0][p][m][n];
#pragma GCC unroll 4
        for (int k = 1; k < kSums; ++k) sum[n] = sum[n] + acc[k][p][m][n];
      }
      if (end) in_order<T>(sum);
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n)
        sum[n].store(scores + m * kScoreStride + p * kLanes + n * R::kWidth);
    }
}

// Up to P panels.
template <class T, int M, int P>
VLORA_INLINE void score_up_to(int64_t panels, const float* q, ptrdiff_t stride, const T* const* keys,
                              int64_t from, int64_t until, bool end, float* scores) {
  if (panels >= P) return score<T, M, P, false>(q, stride, keys, from, until, end, scores, nullptr);
  if constexpr (P > 1) score_up_to<T, M, P - 1>(panels, q, stride, keys, from, until, end, scores);
}

// As many panels at a time as fill the registers with sums; if there are more, by turns.
template <class T, int M>
VLORA_INLINE void score_panels(const float* q, ptrdiff_t stride, const T* const* keys, int64_t panels,
                               int64_t dim, float* scores, const char* fetch) {
  constexpr int kAtOnce = M == 1 ? 4 : M <= 3 ? 2 : 1;
  if (fetch) return score<T, M, 1, true>(q, stride, keys, 0, dim, true, scores, fetch);
  const int64_t each = panels <= kAtOnce ? dim : kChunkBytes / (kLanes * int64_t(sizeof(T)));
  for (int64_t d = 0; d < dim; d += each) {
    const int64_t until = d + each < dim ? d + each : dim;
    for (int64_t p = 0; p < panels; p += kAtOnce)
      score_up_to<T, M, kAtOnce>(panels - p, q, stride, keys + p, d, until, until == dim,
                                 scores + p * kLanes);
  }
}

// out += weights times values of the tokens from … until of each of some panels, M rows by N registers
// of columns. kTurns: token by token of all panels. fetch: as of score, for the first panel.
template <class T, int M, int N, bool kTurns, bool kFetch>
VLORA_INLINE void add_values(const float* weights, const T* const* values, int64_t panels,
                             int64_t from, int64_t until, int64_t column, int64_t padded, float* out,
                             const char* fetch) {
  R acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = R::load(out + m * padded + column + n * R::kWidth);
  const auto add = [&](const T* v, const float* w) __attribute__((always_inline)) {
    R b[N];
    load(v, b);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(w + m * kScoreStride);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n].add_product(s, b[n]);
    }
  };
  if constexpr (kTurns) {
    for (int64_t t = from; t < until; ++t)
      for (int64_t p = 0; p < panels; ++p)
        add(values[p] + t * padded + column, weights + p * kLanes + t);
  } else {
    for (int64_t p = 0; p < panels; ++p) {
      const T* v = values[p] + from * padded + column;
      const float* const w = weights + p * kLanes;
#pragma GCC unroll 2
      for (int64_t t = from; t < until; ++t, v += padded) {
        if constexpr (kFetch) {
          const char* const at = fetch + (t * padded + column) * ptrdiff_t(sizeof(T));
#pragma GCC unroll 8
          for (size_t line = 0; line < N * R::kWidth * sizeof(T); line += 64)
            __builtin_prefetch(at + line);
        }
        add(v, w + t);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n].store(out + m * padded + column + n * R::kWidth);
}

// As many columns at a time as fill the registers.
template <class T, int M, bool kTurns>
VLORA_INLINE void add_all_values(const float* weights, const T* const* values, int64_t panels,
                                 int64_t tokens, int64_t padded, float* out, const char* fetch) {
  constexpr int kWide = (M == 1 ? 4 : M <= 3 ? 2 : 1) * kRegisters;
  const int64_t each = kTurns && panels > 1 ? kChunkTokens : tokens;
  for (int64_t t = 0; t < tokens; t += each) {
    const int64_t until = t + each < tokens ? t + each : tokens;
    int64_t column = 0;
    for (; column + kWide * R::kWidth <= padded; column += kWide * R::kWidth)
      fetch ? add_values<T, M, kWide, false, true>(weights, values, panels, t, until, column, padded, out,
                                                   fetch)
            : add_values<T, M, kWide, kTurns, false>(weights, values, panels, t, until, column, padded,
                                                     out, nullptr);
    for (; column < padded; column += kLanes)
      add_values<T, M, kRegisters, kTurns, false>(weights, values, panels, t, until, column, padded, out,
                                                  nullptr);
  }
}

template <class T, int M = kTileItems>
VLORA_INLINE void score_some(int64_t items, const float* q, ptrdiff_t stride, const T* const* keys,
                             int64_t panels, int64_t dim, float* scores, const char* fetch) {
  if (items >= M) return score_panels<T, M>(q, stride, keys, panels, dim, scores, fetch);
  if constexpr (M > 1) score_some<T, M - 1>(items, q, stride, keys, panels, dim, scores, fetch);
}

// Any number of items, M at a time.
template <class T, int M, bool kTurns>
void add_some_values(int64_t items, const float* weights, const T* const* values, int64_t panels,
                     int64_t tokens, int64_t padded, float* out, const char* fetch) {
  for (; items >= M; items -= M, weights += M * kScoreStride, out += M * padded, fetch = nullptr)
    add_all_values<T, M, kTurns>(weights, values, panels, tokens, padded, out, fetch);
  if constexpr (M > 1)
    if (items > 0)
      add_some_values<T, M - 1, kTurns>(items, weights, values, panels, tokens, padded, out, fetch);
}

// One item's scores, the first `valid` of them, to weights, the others up to `slots` to zeros; its
// earlier sums are scaled to the new maximum, if it is one. sum: of each lane.
VLORA_INLINE void soften(float* scores, int64_t valid, int64_t slots, float& most, float* sum,
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
  if (!(now <= most + kSlack)) {  // a NaN is taken
    const R factor = most == -INFINITY ? R::zero() : exponential(R::all(most - now));
    (R::load(sum) * factor).store(sum);
    for (int64_t d = 0; d < padded; d += R::kWidth) (R::load(out + d) * factor).store(out + d);
    most = now;
  }
  const R level = R::all(most);
  R total = R::load(sum);
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
  total.store(sum);
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
  float* const sums = scores + plan.items() * kScoreStride;  // of each lane
  float* const own = sums + plan.items() * R::kWidth;
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
    R::zero().store(sums + i * R::kWidth);
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
  const int64_t size = layout.panel() * int64_t(sizeof(T));
  // Panels read at once: several where there is time left while they are read. With more products for
  // each byte turns cost more than they bring: one panel, asked for so far ahead that it is there in time.
  const int64_t streams = heads > 1 && of_head <= int64_t(sizeof(T)) ? kStreams : 1;
  const int64_t run = heads > 1 ? streams : kBlockPanels;  // of values
  const int64_t ahead = size * kAhead <= kAheadBytes ? kAhead : ceil_div(kAheadBytes, size);
  const int64_t blocks = ceil_div(piece.panels, kBlockPanels);  // all of about the same size
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = piece.panel + piece.panels * block / blocks;
    const int64_t count = piece.panel + piece.panels * (block + 1) / blocks - begin;
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
    const auto from_head = [&](int64_t first, int64_t until, int64_t head, const T** to) {
      for (int64_t j = first; j < until; ++j) to[j - first] = order[j * heads + head];
    };
    const T* panels[kBlockPanels];
    const int64_t key_runs = ceil_div(count, streams);
    for (int64_t r = 0; r < key_runs; ++r) {
      const int64_t j = count * r / key_runs, until = count * (r + 1) / key_runs;
      for (int64_t h = 0; h < heads; ++h) {
        const char* fetch =
            streams > 1 ? nullptr : reinterpret_cast<const char*>(order[j * heads + h + ahead]);
        if (writes && begin + until == last)
          write_key<T>(p, chunk.row, piece.kv_head + h,
                       Slot<T>(p, chunk, chunk.start, piece.kv_head + h).key);
        from_head(j, until, h, panels);
        for (int64_t t = 0; t * tile < of_head; ++t) {
          if (j >= seen[t]) continue;
          const int64_t i = h * of_head + t * tile, rest = of_head - t * tile;
          score_some<T>(rest < tile ? rest : tile, q + i * padded, padded, panels,
                        (seen[t] < until ? seen[t] : until) - j, dim,
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
      soften(row, valid, panels * kLanes, most[i], sums + i * R::kWidth, out + i * padded,
             padded);
    }
    const int64_t value_runs = ceil_div(count, run);
    for (int64_t r = 0; r < value_runs; ++r) {
      const int64_t j = count * r / value_runs, until = count * (r + 1) / value_runs;
      for (int64_t h = 0; h < heads; ++h) {
        const char* fetch =
            run > 1 ? nullptr : reinterpret_cast<const char*>(order[steps + j * heads + h + ahead]);
        if (writes && begin + until == last)
          write_value<T>(p, chunk.row, piece.kv_head + h,
                         Slot<T>(p, chunk, chunk.start, piece.kv_head + h).value);
        from_head(count + j, count + until, h, panels);
        for (int64_t t = 0; t * tile < of_head; ++t) {
          const int64_t i = h * of_head + t * tile, rest = of_head - t * tile;
          // What the last row sees: beyond lies what may be another sequence's.
          const auto tokens = [&](int64_t panel) {
            const int64_t there = at[t] + 1 - position[panel];
            return there < room[panel] ? there : int64_t(room[panel]);
          };
          const int64_t end = seen[t] < until ? seen[t] : until;
          for (int64_t k = j; k < end;) {  // those of like numbers together
            const int64_t first = k, each = tokens(k);
            while (++k < end && tokens(k) == each) continue;
            const int64_t some = rest < tile ? rest : tile;
            const float* const weights = scores + i * kScoreStride + first * kLanes;
            const T* const* const from = panels + (first - j);
            if (streams > 1) {
              add_some_values<T, kStreamItems, true>(some, weights, from, k - first, each, padded,
                                                     out + i * padded, nullptr);
            } else {
              add_some_values<T, kTileItems, false>(some, weights, from, k - first, each, padded,
                                                    out + i * padded, fetch);
            }
            fetch = nullptr;
          }
        }
      }
    }
  }
  for (int64_t i = 0; i < items; ++i) sum[i] = sum_of(R::load(sums + i * R::kWidth));
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

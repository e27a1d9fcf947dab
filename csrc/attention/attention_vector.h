// Attention's inner loops for one instruction set.
#pragma once

#include "attention/pages.h"
#include "attention/softmax.h"

namespace vlora::attention::VLORA_ISA {

constexpr int kRegisters = kLanes / R::kWidth;  // of a panel
constexpr bool kMany = kRegisters == 1;         // 32 registers where a panel is one, else 16
constexpr int kMost = kMany ? 12 : kTileItems;
// (row, head) pairs whose sums over a panel, or two, fill the registers.
constexpr int64_t kAhead = 8, kAheadBytes = 8192;
constexpr int64_t kStreams = 4;
// Panels that are read at once: the machine's own prefetching follows each of them, and brings more than
// one stream by itself or what is asked for line by line.
constexpr int kStreamItems = kMany ? 4 : 2;
// (row, head) pairs that meet values so read: more of a row's columns at a time.
constexpr int64_t kChunkBytes = 512, kChunkTokens = 4;
// Of one panel before the next one's turn.

constexpr int64_t kQueryStride = kMostDim + kLanes;
// From query to query, whatever the dim: addresses need no registers, and no two fall on the same sets.

// Registers of 16 lanes' sums, or panels, beside each other where M items' sums fill the registers.
constexpr int at_once(int items) {
  if (kMany) return items <= 6 ? 4 : 2;
  return items == 1 ? 4 : items <= 3 ? 2 : 1;
}

// The first or the second of a pair of rows, which lie `row` elements apart or, in bf16, element by
// element side by side: widened by a shift or a mask.
template <class T, int N>
VLORA_INLINE void load(const T* pair, ptrdiff_t row, int second, R (&to)[N]) {
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    if constexpr (sizeof(T) == 2) {
      const T* const at = pair + n * 2 * R::kWidth;
      to[n] = second ? R::odd(at) : R::even(at);
    } else {
      to[n] = R::load(pair + second * row + n * R::kWidth);
    }
  }
}

// Scores of the tokens of P panels: M queries times [dim][kLanes], for the depths
// from … until, all even; later ones are added to what earlier ones left. fetch: null, or as many bytes
// as a panel has are asked for meanwhile. Where sums are few there are several of each, since a sum waits
// for the one before.
template <class T, int M, int P, bool kFetch>
VLORA_INLINE void score(const float* q, const T* const* keys, int64_t from,
                        int64_t until, float* scores, const char* fetch) {
  constexpr int kSums = M * P == 1 ? 4 : M * P <= (kMany ? 6 : 3) ? 2 : 1;
  R acc[kSums][P][M][kRegisters];
#pragma GCC unroll 4
  for (int k = 0; k < kSums; ++k)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 12
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
  const auto add = [&](int k, int64_t d, int second) __attribute__((always_inline)) {
    R b[P][kRegisters];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) load(at[p] + d * kLanes, kLanes, second, b[p]);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const R s = R::broadcast(q + m * kQueryStride + d + second);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
        for (int n = 0; n < kRegisters; ++n) acc[k][p][m][n].add_product(s, b[p][n]);
    }
  };
  int64_t d = from;
  for (; d + kSteps <= until; d += kSteps) {
    constexpr ptrdiff_t kRow = kLanes * sizeof(T);
#pragma GCC unroll 4
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (kFetch)
        if (k * kRow % 64 == 0) __builtin_prefetch(fetch + (d + k) * kRow);
      add(k % kSums, d + k / 2 * 2, k % 2);
    }
  }
  for (; d < until; d += 2) {
    add(0, d, 0);
    add(0, d, 1);
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < kRegisters; ++n) {
        R sum = acc[0][p][m][n];
#pragma GCC unroll 4
        for (int k = 1; k < kSums; ++k) sum = sum + acc[k][p][m][n];
        sum.store(scores + m * kScoreStride + p * kLanes + n * R::kWidth);
      }
}

// Up to P panels.
template <class T, int M, int P>
VLORA_INLINE void score_up_to(int64_t panels, const float* q, const T* const* keys,
                              int64_t from, int64_t until, float* scores) {
  if (panels >= P) return score<T, M, P, false>(q, keys, from, until, scores, nullptr);
  if constexpr (P > 1) score_up_to<T, M, P - 1>(panels, q, keys, from, until, scores);
}

// As many panels at a time as fill the registers with sums; if there are more, by turns.
template <class T, int M>
void score_panels(const float* q, const T* const* keys, int64_t panels, int64_t dim,
                  float* scores, const char* fetch) {
  constexpr int kAtOnce = at_once(M);
  if (fetch) return score<T, M, 1, true>(q, keys, 0, dim, scores, fetch);
  const int64_t each = panels <= kAtOnce ? dim : kChunkBytes / (kLanes * int64_t(sizeof(T)));
  for (int64_t d = 0; d < dim; d += each) {
    const int64_t until = d + each < dim ? d + each : dim;
    for (int64_t p = 0; p < panels; p += kAtOnce)
      score_up_to<T, M, kAtOnce>(panels - p, q, keys + p, d, until, scores + p * kLanes);
  }
}

// out += weights times values of the tokens from … until of each of some panels, M rows by N registers
// of columns. from: even. kTurns: two tokens of all panels in turn. fetch: as of score, for the first
// panel.
template <class T, int M, int N, bool kTurns, bool kFetch>
VLORA_INLINE void add_values(const float* weights, const T* const* values, int64_t panels,
                             int64_t from, int64_t until, int64_t column, int64_t padded, float* out,
                             const char* fetch) {
  constexpr int kPair = int(4 / sizeof(T));  // neighbours in memory that are one column's
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
  // What lies beyond the last token is not looked at, though it may be the other half of a pair.
  const auto add_pair = [&](int64_t p, int64_t t) __attribute__((always_inline)) {
    const T* const pair = values[p] + t * padded + column * kPair;
    const float* const w = weights + p * kLanes + t;
    add(pair, w, 0);
    if (t + 1 < until) add(pair, w, 1);
  };
  if constexpr (kTurns) {
    for (int64_t t = from; t < until; t += 2)
      for (int64_t p = 0; p < panels; ++p) add_pair(p, t);
  } else {
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t t = from; t < until; t += 2) {
        if constexpr (kFetch) {
          const char* const at = fetch + (t * padded + column * kPair) * ptrdiff_t(sizeof(T));
#pragma GCC unroll 8
          for (size_t line = 0; line < 4 * N * R::kWidth; line += 64) {
            __builtin_prefetch(at + line);
            if (kPair == 1) __builtin_prefetch(at + padded * ptrdiff_t(sizeof(T)) + line);
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

// As many columns at a time as fill the registers.
template <class T, int M, bool kTurns>
void add_all_values(const float* weights, const T* const* values, int64_t panels, int64_t tokens,
                    int64_t padded, float* out, const char* fetch) {
  constexpr int kWide = at_once(M) * kRegisters;
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

template <class T, int M = kMost>
VLORA_INLINE void score_some(int64_t items, const float* q, const T* const* keys,
                             int64_t panels, int64_t dim, float* scores, const char* fetch) {
  if (items >= M) return score_panels<T, M>(q, keys, panels, dim, scores, fetch);
  if constexpr (M > 1) score_some<T, M - 1>(items, q, keys, panels, dim, scores, fetch);
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
  float* const scores = q + plan.items() * kQueryStride;
  float* const sums = scores + plan.items() * kScoreStride;  // of each lane
  float* const own = sums + plan.items() * R::kWidth;
  float* const most = partial ? partial : own;
  float* const sum = most + plan.items();
  float* const out = sum + plan.items();
  for (int64_t i = 0; i < items; ++i) {
    const int64_t of = chunk.row + piece.row + i % of_head / group;
    const int64_t head = (piece.kv_head + i / of_head) * group + i % group;
    rotate(p.q + of * p.q_stride + head * dim, p.cosines + of * (dim / 2), p.sines + of * (dim / 2),
           dim / 2, p.scale, q + i * kQueryStride);
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
  const int64_t tile = ceil_div(of_head, ceil_div(of_head, int64_t(kMost)));
  const int64_t last = piece.panel + piece.panels;
  const bool writes = chunk.length == 1 && piece.last();
  const int64_t size = layout.panel() * int64_t(sizeof(T));
  // Panels read at once: several where there is time left while they are read. With more products for
  // each byte turns cost more than they bring: one panel, asked for so far ahead that it is there in time.
  const int64_t streams = heads > 1 && of_head <= (kMany ? 4 : int64_t(sizeof(T))) ? kStreams : 1;
  const int64_t key_run = heads > 1 ? streams : kMany ? at_once(int(tile)) : 1;
  const int64_t value_run = heads > 1 ? streams : kBlockPanels;
  const int64_t ahead = size * kAhead <= kAheadBytes ? kAhead : ceil_div(kAheadBytes, size);
  const int64_t blocks = ceil_div(piece.panels, kBlockPanels);  // all of about the same size
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = piece.panel + piece.panels * block / blocks;
    const int64_t count = piece.panel + piece.panels * (block + 1) / blocks - begin;
    const T* keys[kBlockPanels];
    const Visible see(layout, begin, count);
    for (int64_t j = 0; j < count; ++j) keys[j] = keys_of(begin + j);
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
      seen[t] = see.panels(at[t]);
    }
    const auto from_head = [&](int64_t first, int64_t until, int64_t head, const T** to) {
      for (int64_t j = first; j < until; ++j) to[j - first] = order[j * heads + head];
    };
    const T* panels[kBlockPanels];
    const int64_t key_runs = ceil_div(count, key_run);
    for (int64_t r = 0; r < key_runs; ++r) {
      const int64_t j = count * r / key_runs, until = count * (r + 1) / key_runs;
      for (int64_t h = 0; h < heads; ++h) {
        const char* fetch =
            key_run > 1 ? nullptr : reinterpret_cast<const char*>(order[j * heads + h + ahead]);
        if (writes && begin + until == last)
          write_key<T>(p, chunk.row, piece.kv_head + h,
                       Slot<T>(p, chunk, chunk.start, piece.kv_head + h));
        from_head(j, until, h, panels);
        for (int64_t t = 0; t * tile < of_head; ++t) {
          if (j >= seen[t]) continue;
          const int64_t i = h * of_head + t * tile, rest = of_head - t * tile;
          score_some<T>(rest < tile ? rest : tile, q + i * kQueryStride, panels,
                        (seen[t] < until ? seen[t] : until) - j, dim,
                        scores + i * kScoreStride + j * kLanes, fetch);
          fetch = nullptr;
        }
      }
    }
    for (int64_t i = 0; i < items; ++i) {
      const int64_t own_at = first_position + i % of_head / group, panels = seen[i % of_head / tile];
      float* const row = scores + i * kScoreStride;
      const int64_t valid = see.mask(own_at, panels, layout.block, row);
      soften<false>(row, valid, panels * kLanes, most[i], sums + i * R::kWidth, out + i * padded,
             padded);
    }
    const int64_t value_runs = ceil_div(count, value_run);
    for (int64_t r = 0; r < value_runs; ++r) {
      const int64_t j = count * r / value_runs, until = count * (r + 1) / value_runs;
      for (int64_t h = 0; h < heads; ++h) {
        const char* fetch =
            value_run > 1 ? nullptr : reinterpret_cast<const char*>(order[steps + j * heads + h + ahead]);
        if (writes && begin + until == last)
          write_value<T>(p, chunk.row, piece.kv_head + h,
                         Slot<T>(p, chunk, chunk.start, piece.kv_head + h));
        from_head(count + j, count + until, h, panels);
        for (int64_t t = 0; t * tile < of_head; ++t) {
          const int64_t i = h * of_head + t * tile, rest = of_head - t * tile;
          // What the last row sees: beyond lies what may be another sequence's.
          const auto tokens = [&](int64_t panel) {
            const int64_t there = at[t] + 1 - see.position[panel];
            return there < see.room[panel] ? there : see.room[panel];
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
              add_some_values<T, kMost, false>(some, weights, from, k - first, each, padded,
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
    finish(out + i * padded, 1 / sum[i], dim, to);
  }
}

}  // namespace vlora::attention::VLORA_ISA

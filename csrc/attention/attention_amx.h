// Attention over bf16 pages by a unit that multiplies tiles of pairs: AMX, or its twin in plain C++.
// Included after runtime/tile_product.h and an instruction set's registers.
//
// Queries and weights, fp32, meet keys and values as two bf16 values each, the upper half of their bits
// and what that leaves. Both products go to the same sums: close to fp32's own precision, and still a
// small part of the time.
#pragma once

#include <algorithm>
#include <utility>

#include "attention/attention_vector.h"

namespace vlora::attention::VLORA_ISA {

constexpr int kRows = runtime::kTile, kSteps = runtime::kTile;  // of one tile: (row, head) pairs, pairs of depth
constexpr int kStepBytes = 4 * kLanes;        // of a panel of keys, a pair of each token
constexpr int kLowBytes = 64;  // from weights of 32 tokens to what they leave, where scores were

// body(At<0>) … body(At<N - 1>): registers are named by constants.
template <class Body, int... I>
VLORA_INLINE void each_of(const Body& body, std::integer_sequence<int, I...>) {
  (body(At<I>{}), ...);
}
template <int N, class Body>
VLORA_INLINE void each(const Body& body) {
  each_of(body, std::make_integer_sequence<int, N>{});
}

// What both products have on their left: rows of pairs in two halves, `low` bytes apart.
struct Left {
  const char* at;
  ptrdiff_t bytes, low;  // from row to row
};

// out (+)= left times right: kTall tiles of rows by kWide tiles of columns, over `count` tiles of depth.
// depth(k): bytes from a row's begin. right(k, c): a tile, whose lines are `right_bytes` apart.
template <int kTall, int kWide, class Depth, class Right>
VLORA_INLINE void product(const Left& left, const Depth& depth, int64_t count, const Right& right,
                          ptrdiff_t right_bytes, float* out, ptrdiff_t out_stride, bool first) {
  using U = TileRegisters;
  static_assert(kTall * kWide <= 4);
  const auto place = [&](auto sum) {
    return out + sum.value / kWide * kRows * out_stride + sum.value % kWide * kLanes;
  };
  each<kTall * kWide>([&](auto sum) __attribute__((always_inline)) {
    if (first)
      U::zero<sum.value>();
    else
      U::load<sum.value>(place(sum), 4 * out_stride);
  });
  for (int64_t k = 0; k < count; ++k) {
    const char* const at = left.at + depth(k);
    // Two tiles of columns at a time, for which there are registers; a sum is not added to again at once.
    each<(kWide + 1) / 2>([&](auto two) __attribute__((always_inline)) {
      constexpr int c = 2 * two.value;
      constexpr bool kSecond = c + 1 < kWide;
      U::load<6>(right(k, c), right_bytes);
      if constexpr (kSecond) U::load<7>(right(k, c + 1), right_bytes);
      each<2>([&](auto half) __attribute__((always_inline)) {
        each<kTall>([&](auto tile) __attribute__((always_inline)) {
          // One tile of rows has a register for each of its halves.
          constexpr int a = 4 + (kTall == 2 ? tile.value : half.value);
          if (kTall == 2 || c == 0)
            U::load<a>(at + tile.value * kRows * left.bytes + half.value * left.low, left.bytes);
          U::multiply<tile.value * kWide + c, a, 6>();
          if constexpr (kSecond) U::multiply<tile.value * kWide + c + 1, a, 7>();
        });
      });
    });
  }
  each<kTall * kWide>([&](auto sum) __attribute__((always_inline)) {
    U::store<sum.value>(place(sum), 4 * out_stride);
  });
}

// The same for any number of tiles of columns. right(k, c) counts them from 0.
template <int kTall, class Depth, class Right>
VLORA_INLINE void product_of(int64_t columns, const Left& left, const Depth& depth, int64_t count,
                             const Right& right, ptrdiff_t right_bytes, float* out,
                             ptrdiff_t out_stride, bool first) {
  constexpr int kWide = 4 / kTall;
  int64_t c = 0;
  const auto from = [&](int64_t k, int i) { return right(k, c + i); };
  for (; c + kWide <= columns; c += kWide)
    product<kTall, kWide>(left, depth, count, from, right_bytes, out + c * kLanes, out_stride, first);
  if constexpr (kWide == 4) {
    if (c + 2 <= columns) {
      product<kTall, 2>(left, depth, count, from, right_bytes, out + c * kLanes, out_stride, first);
      c += 2;
    }
  }
  if (c < columns)
    product<kTall, 1>(left, depth, count, from, right_bytes, out + c * kLanes, out_stride, first);
}

// The first `tokens` of a panel of values, zeros after them.
VLORA_INLINE void copy_values(const uint16_t* from, int64_t tokens, int64_t padded, uint16_t* to) {
  const int64_t whole = tokens / 2 * 2 * padded;
  std::memcpy(to, from, size_t(whole) * sizeof *to);
  std::memset(to + whole, 0, size_t(kLanes * padded - whole) * sizeof *to);
  if (tokens % 2)
    for (int64_t d = 0; d < padded; ++d) to[whole + 2 * d] = from[whole + 2 * d];
}

// As `attend` of tiles.h. Items lie in slots, those of a head from a whole tile on where they are more
// than one.
inline void attend_tiled(const Problem& p, const Piece& piece, float* scratch, float* partial) {
  using T = uint16_t;
  const Plan& plan = *p.plan;
  const Layout& layout = plan.layout;
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  const int64_t group = plan.heads / layout.kv_heads, of_head = piece.rows * group;
  const int64_t heads = piece.kv_heads;
  const int64_t dim = layout.dim, padded = layout.padded(), per_page = layout.panels();
  const int64_t first_position = chunk.start + piece.row, end = chunk.start + chunk.length;
  const int rows = int(std::min<int64_t>(of_head, kRows));
  const int64_t per_head = ceil_div(of_head, int64_t(rows)) * rows, slots = per_head * heads;
  // visit(item, slot, row of the chunk, head of queries)
  const auto each_item = [&](const auto& visit) __attribute__((always_inline)) {
    for (int64_t h = 0, i = 0; h < heads; ++h)
      for (int64_t row = 0, slot = h * per_head; row < piece.rows; ++row)
        for (int64_t g = 0; g < group; ++g, ++i, ++slot)
          visit(i, slot, piece.row + row, (piece.kv_head + h) * group + g);
  };

  T* const q = reinterpret_cast<T*>(scratch);
  const int64_t half = ceil_div(padded, 2 * kLanes) * 2 * kLanes;  // of a query, in two whole registers
  float* const scores = scratch + slots * half;  // both halves take as much as the whole
  float* const out = scores + slots * kScoreStride;
  float* const sums = out + slots * padded;  // of each lane
  float* const most = sums + slots * R::kWidth;
  T* const copied = reinterpret_cast<T*>(most + ceil_div(slots, kLanes) * kLanes);
  std::memset(q, 0, size_t(slots * half) * 4);
  std::memset(out, 0, size_t(slots * padded) * 4);
  float query[kMostDim + 2 * R::kWidth];
  each_item([&](int64_t, int64_t slot, int64_t row, int64_t head) __attribute__((always_inline)) {
    const int64_t of = chunk.row + row;
    rotate(p.q + of * p.q_stride + head * dim, p.cosines + of * (dim / 2), p.sines + of * (dim / 2),
           dim / 2, p.scale, query);
    for (int64_t d = dim; d < padded; ++d) query[d] = 0;
    T* const to = q + slot * 2 * half;
    for (int64_t d = 0; d < padded; d += 2 * R::kWidth) {
      const R second = d + R::kWidth < padded ? R::load(query + d + R::kWidth) : R::zero();
      R::store_halves(R::load(query + d), second, to + d, to + half + d);
    }
    most[slot] = -INFINITY;
    R::zero().store(sums + slot * R::kWidth);
  });
  const int32_t* pages = plan.pages.data() + chunk.first_page;
  const T* const base = reinterpret_cast<const T*>(p.cache) + piece.kv_head * layout.head();
  const int64_t last = piece.panel + piece.panels;
  const bool writes = chunk.length == 1 && piece.last();
  // Of depth: the padded dim is a multiple of eight steps. Tokens: of a panel, or of two that were copied
  // together where many rows are to meet them.
  const bool many = of_head > kRows;
  const int key_steps = padded % (2 * kSteps) == 0 ? kSteps : kSteps / 2;
  const int64_t key_tiles = padded / 2 / key_steps;
  const int64_t run = heads > 1 ? 4 : kBlockPanels;  // panels of one head at a time
  const int64_t unit = rows == kRows ? 2 * kRows : rows, units = ceil_div(of_head, unit);
  const int64_t blocks = ceil_div(piece.panels, kBlockPanels);  // all of about the same size
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = piece.panel + piece.panels * block / blocks;
    const int64_t count = piece.panel + piece.panels * (block + 1) / blocks - begin;
    const T* keys[kBlockPanels];
    const Visible see(layout, begin, count);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t panel = begin + j;
      keys[j] = base + pages[panel / per_page] * layout.page + panel % per_page * layout.panel();
    }
    // Panels that a unit's last row sees.
    const auto seen = [&](int64_t u) {
      return see.panels(first_position + (std::min((u + 1) * unit, of_head) - 1) / group);
    };
    configure(rows, rows, key_steps);
    for (int64_t j = 0; j < count; j += run)
      for (int64_t h = 0; h < heads; ++h) {
        if (writes && j + run >= count && begin + count == last)
          write_key<T>(p, chunk.row, piece.kv_head + h, Slot<T>(p, chunk, chunk.start, piece.kv_head + h));
        for (int64_t u = 0; u < units; ++u) {
          const int64_t columns = std::min(seen(u), j + run) - j, slot = h * per_head + u * unit;
          if (columns <= 0) continue;
          const Left left{reinterpret_cast<const char*>(q + slot * 2 * half), half * 4, half * 2};
          const auto depth = [&](int64_t k) { return k * key_steps * 4; };
          const auto right = [&](int64_t k, int64_t c) {
            return keys[j + c] + h * layout.head() + k * key_steps * (kStepBytes / 2);
          };
          float* const to = scores + slot * kScoreStride + j * kLanes;
          if (of_head - u * unit > kRows)
            product_of<2>(columns, left, depth, key_tiles, right, kStepBytes, to, kScoreStride, true);
          else
            product_of<1>(columns, left, depth, key_tiles, right, kStepBytes, to, kScoreStride, true);
        }
      }
    int64_t panels = 0;
    each_item([&](int64_t, int64_t slot, int64_t row, int64_t) __attribute__((always_inline)) {
      const int64_t in_head = slot % per_head;
      if (in_head % unit == 0) panels = seen(in_head / unit);
      float* const own = scores + slot * kScoreStride;
      const int64_t valid = see.mask(chunk.start + row, panels, layout.block, own);
      // Tiles of values take panels by two.
      soften<true>(own, valid, ceil_div(panels, int64_t(2)) * 2 * kLanes, most[slot],
                   sums + slot * R::kWidth, out + slot * padded, padded);
    });
    configure(rows, rows, many ? kSteps : kSteps / 2);
    for (int64_t j = 0; j < count; j += run)
      for (int64_t h = 0; h < heads; ++h) {
        if (writes && j + run >= count && begin + count == last)
          write_value<T>(p, chunk.row, piece.kv_head + h, Slot<T>(p, chunk, chunk.start, piece.kv_head + h));
        const T* values[kBlockPanels];
        const int64_t until = std::min(j + run, count);
        for (int64_t k = j; k < until; ++k) {
          values[k - j] = keys[k] + h * layout.head() + layout.values();
          // Slots that hold nothing are not multiplied, not even by zero.
          const int64_t there = std::min(end - see.position[k], see.room[k]);
          if (!many && there == kLanes) continue;
          T* const to = copied + (k - j) * layout.panel();
          copy_values(values[k - j], there, padded, to);
          values[k - j] = to;
        }
        if (many && (until - j) % 2)
          std::memset(copied + (until - j) * layout.panel(), 0, size_t(layout.panel()) * sizeof(T));
        for (int64_t u = 0; u < units; ++u) {
          const int64_t panels = std::min(seen(u), until) - j, slot = h * per_head + u * unit;
          if (panels <= 0) continue;
          const Left left{reinterpret_cast<const char*>(scores + slot * kScoreStride + j * kLanes),
                          kScoreStride * 4, kLowBytes};
          float* const to = out + slot * padded;
          if (!many) {
            product_of<1>(
                padded / kLanes, left, [](int64_t k) { return k / 2 * 128 + k % 2 * 32; }, panels,
                [&](int64_t k, int64_t c) { return values[k] + c * 2 * kLanes; }, padded * 4, to, padded,
                false);
            continue;
          }
          const auto depth = [](int64_t k) { return k * 128; };
          const auto right = [&](int64_t k, int64_t c) {
            return copied + k * 2 * layout.panel() + c * 2 * kLanes;
          };
          const int64_t tiles = ceil_div(panels, int64_t(2));
          if (of_head - u * unit > kRows)
            product_of<2>(padded / kLanes, left, depth, tiles, right, padded * 4, to, padded, false);
          else
            product_of<1>(padded / kLanes, left, depth, tiles, right, padded * 4, to, padded, false);
        }
      }
  }
  release_tiles();
  each_item([&](int64_t i, int64_t slot, int64_t row, int64_t head) __attribute__((always_inline)) {
    const float sum = sum_of(R::load(sums + slot * R::kWidth));
    if (partial) {
      partial[i] = most[slot];
      partial[plan.items() + i] = sum;
      std::memcpy(partial + 2 * plan.items() + i * padded, out + slot * padded, size_t(padded) * 4);
      return;
    }
    finish(out + slot * padded, 1 / sum, dim, p.y + (chunk.row + row) * p.y_stride + head * dim);
  });
}

// A tile with few rows takes as long as a whole one.
constexpr int64_t kFewItems = 8;
inline void attend_by_size(const Problem& p, const Piece& piece, float* scratch, float* partial) {
  const bool few = piece.rows * (p.plan->heads / p.plan->layout.kv_heads) < kFewItems;
  (few ? attend<uint16_t> : attend_tiled)(p, piece, scratch, partial);
}

}  // namespace vlora::attention::VLORA_ISA

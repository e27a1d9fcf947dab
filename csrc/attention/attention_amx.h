// Attention over bf16 pages on a tile unit. Included after the unit's tile registers,
// runtime/tile_product.h, and an instruction set's registers.
//
// Queries and weights are fp32, keys and values bf16. Each query or weight is split into two bf16
// values: the upper half of its bits, and the rounded rest. Their sum is within 2^-16 of it. Both
// products are added to the same sums.
#pragma once

#include <algorithm>

#include "attention/attention_vector.h"

namespace vlora::attention::VLORA_ISA {

using runtime::kAmxRows;

// Bytes of a step in a panel of keys: one pair per token.
constexpr int kStepBytes = 4 * kLanes;
// Weights replace the scores of 32 tokens: first their upper halves, then, after these bytes, their
// rests.
constexpr int kLowBytes = 64;
// Minimum queries of a head in a piece. Vectors compute pieces with fewer, since a tile with few
// rows takes as long as a full one.
constexpr int64_t kMinTileQueries = 8;

// The left factor of both products: rows of pairs, `row` bytes apart. The rests are `low` bytes
// after the upper halves.
struct SplitRows {
  const char* at;
  ptrdiff_t row, low;
};

// out (+)= left times right: kTall tiles of rows by kWide tiles of columns, over `count` tiles of
// depth. depth(k): byte offset of tile k in a row of the left factor. right(k, c): a tile, whose
// lines are `right_bytes` apart.
//
// TileBlock::multiply_depth cannot be used: each tile of the left factor has two halves that are
// multiplied by the same right tile, and a block may be four tiles wide, with two right tiles
// loaded at a time.
template <int kTall, int kWide, class Depth, class Right>
VLORA_INLINE void multiply_block(const SplitRows& left, const Depth& depth, int64_t count,
                                 const Right& right, ptrdiff_t right_bytes, float* out,
                                 ptrdiff_t out_stride, bool first) {
  using U = TileRegisters;
  using Block = TileBlock<kTall, kWide>;
  if (first)
    Block::zero();
  else
    Block::load(out, out_stride);
#pragma GCC unroll 1
  for (int64_t k = 0; k < count; ++k) {
    const char* const rows = left.at + depth(k);
    // No two successive products add to the same sum, since the second would wait for the first.
    for_each_index<(kWide + 1) / 2>([&](auto two) __attribute__((always_inline)) {
      constexpr int c = 2 * two.value;
      constexpr bool kSecond = c + 1 < kWide;
      U::load<6>(right(k, c), right_bytes);
      if constexpr (kSecond) U::load<7>(right(k, c + 1), right_bytes);
      for_each_index<2>([&](auto half) __attribute__((always_inline)) {
        for_each_index<kTall>([&](auto tile) __attribute__((always_inline)) {
          // With one tile of rows, each half has its own register and stays loaded for all columns.
          constexpr int kLeft = 4 + (kTall == 2 ? tile.value : half.value);
          if (kTall == 2 || c == 0)
            U::load<kLeft>(rows + tile.value * kAmxRows * left.row + half.value * left.low,
                           left.row);
          Block::template multiply<tile.value, c, kLeft>();
          if constexpr (kSecond) Block::template multiply<tile.value, c + 1, kLeft>();
        });
      });
    });
  }
  Block::store(out, out_stride);
}

// Multiplies any number of tiles of columns. right(k, c) counts columns from 0.
template <int kTall, class Depth, class Right>
VLORA_INLINE void multiply_columns(int64_t columns, const SplitRows& left, const Depth& depth,
                                   int64_t count, const Right& right, ptrdiff_t right_bytes,
                                   float* out, ptrdiff_t out_stride, bool first) {
  constexpr int kWide = 4 / kTall;
  int64_t c = 0;
  const auto from = [&](int64_t k, int i) { return right(k, c + i); };
  for (; c + kWide <= columns; c += kWide)
    multiply_block<kTall, kWide>(left, depth, count, from, right_bytes, out + c * kLanes,
                                 out_stride, first);
  if constexpr (kWide == 4) {
    if (c + 2 <= columns) {
      multiply_block<kTall, 2>(left, depth, count, from, right_bytes, out + c * kLanes, out_stride,
                               first);
      c += 2;
    }
  }
  if (c < columns)
    multiply_block<kTall, 1>(left, depth, count, from, right_bytes, out + c * kLanes, out_stride,
                             first);
}

// Copies the first `tokens` tokens of a panel of values and fills the rest with zeros.
VLORA_INLINE void copy_values(const uint16_t* from, int64_t tokens, int64_t padded, uint16_t* to) {
  const int64_t pairs = tokens / 2 * 2 * padded;
  std::memcpy(to, from, size_t(pairs) * sizeof *to);
  std::memset(to + pairs, 0, size_t(kLanes * padded - pairs) * sizeof *to);
  if (tokens % 2)
    for (int64_t d = 0; d < padded; ++d) to[pairs + 2 * d] = from[pairs + 2 * d];
}

// Computes attention of a piece, like `attend`. Queries are kept in slots. A head with more than
// one tile of queries begins with a full tile.
inline void attend_by_tiles(const Problem& p, const Piece& piece, float* scratch, float* partial) {
  using T = uint16_t;
  const Plan& plan = *p.plan;
  const Layout& layout = plan.layout;
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  const int64_t group = plan.heads / layout.kv_heads, per_head = piece.rows * group;
  const int64_t heads = piece.kv_heads;
  const int64_t dim = layout.dim, padded = layout.padded(), page_panels = layout.panels();
  const int64_t first_position = chunk.start + piece.row, end_position = chunk.start + chunk.length;
  const int rows = int(std::min<int64_t>(per_head, kAmxRows));
  const int64_t head_slots = ceil_div(per_head, int64_t(rows)) * rows, slots = head_slots * heads;
  // Calls visit(query, slot, row of the chunk, head of queries).
  const auto each_query = [&](const auto& visit) __attribute__((always_inline)) {
    for (int64_t h = 0, i = 0; h < heads; ++h)
      for (int64_t row = 0, slot = h * head_slots; row < piece.rows; ++row)
        for (int64_t g = 0; g < group; ++g, ++i, ++slot)
          visit(i, slot, piece.row + row, (piece.kv_head + h) * group + g);
  };

  T* const q = reinterpret_cast<T*>(scratch);
  // Number of values of a query, rounded up to two full registers. Its two parts take as much
  // memory as the query in fp32.
  const int64_t depth_padded = ceil_div(padded, 2 * kLanes) * 2 * kLanes;
  float* const scores = scratch + slots * depth_padded;
  float* const out = scores + slots * kScoreStride;
  float* const lane_sums = out + slots * padded;
  float* const maxima = lane_sums + slots * R::kWidth;
  T* const copied = reinterpret_cast<T*>(maxima + ceil_div(slots, kLanes) * kLanes);
  std::memset(q, 0, size_t(slots * depth_padded) * 4);
  std::memset(out, 0, size_t(slots * padded) * 4);
  float query[kMaxDim + 2 * R::kWidth];
  each_query(
      [&](int64_t, int64_t slot, int64_t chunk_row, int64_t head) __attribute__((always_inline)) {
        const int64_t row = chunk.row + chunk_row;
        rotate(p.q + row * p.q_stride + head * dim, p.cosines + row * (dim / 2),
               p.sines + row * (dim / 2), dim / 2, p.scale, query);
        for (int64_t d = dim; d < padded; ++d) query[d] = 0;
        T* const to = q + slot * 2 * depth_padded;
        for (int64_t d = 0; d < padded; d += 2 * R::kWidth) {
          const R second = d + R::kWidth < padded ? R::load(query + d + R::kWidth) : R::zero();
          R::store_split(R::load(query + d), second, to + d, to + depth_padded + d);
        }
        maxima[slot] = -INFINITY;
        R::zero().store(lane_sums + slot * R::kWidth);
      });
  const int32_t* pages = plan.pages.data() + chunk.first_page;
  const T* const base = reinterpret_cast<const T*>(p.cache) + piece.kv_head * layout.head();
  const int64_t end_panel = piece.panel + piece.panels;
  const bool writes = chunk.length == 1 && piece.last();
  // If several tiles of queries are multiplied by the same values, the values are copied, and two
  // panels form a tile of depth. Otherwise one panel does.
  const bool copies = per_head > kAmxRows;
  // Steps in a tile of keys. The padded dim is a multiple of eight steps.
  const int key_steps = padded % (2 * kAmxRows) == 0 ? kAmxRows : kAmxRows / 2;
  const int64_t key_tiles = padded / 2 / key_steps;
  const int64_t run =
      heads > 1 ? 4 : kBlockPanels;  // panels of one head before those of the next head
  // Number of queries that are multiplied together: one or two tiles of rows.
  const int64_t unit = rows == kAmxRows ? 2 * kAmxRows : rows, units = ceil_div(per_head, unit);
  const int64_t blocks = ceil_div(piece.panels, kBlockPanels);  // of nearly the same size
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = piece.panel + piece.panels * block / blocks;
    const int64_t count = piece.panel + piece.panels * (block + 1) / blocks - begin;
    const T* keys[kBlockPanels];
    const Visible visible(layout, begin, count);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t panel = begin + j;
      keys[j] =
          base + pages[panel / page_panels] * layout.page + panel % page_panels * layout.panel();
    }
    // Returns the number of panels that a unit's last row sees.
    const auto seen = [&](int64_t u) {
      return visible.panels(first_position + (std::min((u + 1) * unit, per_head) - 1) / group);
    };
    configure(rows, rows, key_steps);
    for (int64_t j = 0; j < count; j += run)
      for (int64_t h = 0; h < heads; ++h) {
        if (writes && j + run >= count && begin + count == end_panel)
          write_key(layout, Stored<T>(p, chunk.row, piece.kv_head + h),
                    Slot<T>(p, chunk, chunk.start, piece.kv_head + h));
        for (int64_t u = 0; u < units; ++u) {
          const int64_t columns = std::min(seen(u), j + run) - j, slot = h * head_slots + u * unit;
          if (columns <= 0) continue;
          const SplitRows left{reinterpret_cast<const char*>(q + slot * 2 * depth_padded),
                               depth_padded * 4, depth_padded * 2};
          const auto depth = [&](int64_t k) { return k * key_steps * 4; };
          const auto right = [&](int64_t k, int64_t c) {
            return keys[j + c] + h * layout.head() + k * key_steps * (kStepBytes / 2);
          };
          float* const to = scores + slot * kScoreStride + j * kLanes;
          if (per_head - u * unit > kAmxRows)
            multiply_columns<2>(columns, left, depth, key_tiles, right, kStepBytes, to,
                                kScoreStride, true);
          else
            multiply_columns<1>(columns, left, depth, key_tiles, right, kStepBytes, to,
                                kScoreStride, true);
        }
      }
    int64_t panels = 0;
    each_query([&](int64_t, int64_t slot, int64_t row, int64_t) __attribute__((always_inline)) {
      const int64_t in_head = slot % head_slots;
      if (in_head % unit == 0) panels = seen(in_head / unit);
      float* const own = scores + slot * kScoreStride;
      const int64_t valid = visible.mask(chunk.start + row, panels, layout.block, own);
      // A tile of values may take two panels, so weights are written for an even number of panels.
      to_weights<true>(own, valid, ceil_div(panels, int64_t(2)) * 2 * kLanes, maxima[slot],
                       lane_sums + slot * R::kWidth, out + slot * padded, padded);
    });
    configure(rows, rows, copies ? kAmxRows : kAmxRows / 2);
    for (int64_t j = 0; j < count; j += run)
      for (int64_t h = 0; h < heads; ++h) {
        if (writes && j + run >= count && begin + count == end_panel)
          write_value(layout, Stored<T>(p, chunk.row, piece.kv_head + h),
                      Slot<T>(p, chunk, chunk.start, piece.kv_head + h));
        const T* values[kBlockPanels];
        const int64_t until = std::min(j + run, count);
        for (int64_t k = j; k < until; ++k) {
          values[k - j] = keys[k] + h * layout.head() + layout.values();
          // Unused slots may hold NaN, so they must not be multiplied, not even by zero.
          const int64_t tokens = std::min(end_position - visible.position[k], visible.tokens[k]);
          if (!copies && tokens == kLanes) continue;
          T* const to = copied + (k - j) * layout.panel();
          copy_values(values[k - j], tokens, padded, to);
          values[k - j] = to;
        }
        if (copies && (until - j) % 2)
          std::memset(copied + (until - j) * layout.panel(), 0, size_t(layout.panel()) * sizeof(T));
        for (int64_t u = 0; u < units; ++u) {
          const int64_t unit_panels = std::min(seen(u), until) - j,
                        slot = h * head_slots + u * unit;
          if (unit_panels <= 0) continue;
          const SplitRows left{
              reinterpret_cast<const char*>(scores + slot * kScoreStride + j * kLanes),
              kScoreStride * 4, kLowBytes};
          float* const to = out + slot * padded;
          if (!copies) {
            multiply_columns<1>(
                padded / kLanes, left, [](int64_t k) { return k / 2 * 128 + k % 2 * 32; },
                unit_panels, [&](int64_t k, int64_t c) { return values[k] + c * 2 * kLanes; },
                padded * 4, to, padded, false);
            continue;
          }
          const auto depth = [](int64_t k) { return k * 128; };
          const auto right = [&](int64_t k, int64_t c) {
            return copied + k * 2 * layout.panel() + c * 2 * kLanes;
          };
          const int64_t tiles = ceil_div(unit_panels, int64_t(2));
          if (per_head - u * unit > kAmxRows)
            multiply_columns<2>(padded / kLanes, left, depth, tiles, right, padded * 4, to, padded,
                                false);
          else
            multiply_columns<1>(padded / kLanes, left, depth, tiles, right, padded * 4, to, padded,
                                false);
        }
      }
  }
  each_query([&](int64_t i, int64_t slot, int64_t row, int64_t head)
                 __attribute__((always_inline)) {
                   const float sum = sum_of(R::load(lane_sums + slot * R::kWidth));
                   if (partial) {
                     partial[i] = maxima[slot];
                     partial[plan.queries() + i] = sum;
                     std::memcpy(partial + 2 * plan.queries() + i * padded, out + slot * padded,
                                 size_t(padded) * 4);
                     return;
                   }
                   write_output(out + slot * padded, 1 / sum, dim,
                                p.y + (chunk.row + row) * p.y_stride + head * dim);
                 });
}

inline void attend_bf16(const Problem& p, const Piece& piece, float* scratch, float* partial) {
  const bool few = piece.rows * (p.plan->heads / p.plan->layout.kv_heads) < kMinTileQueries;
  (few ? attend<uint16_t> : attend_by_tiles)(p, piece, scratch, partial);
}

}  // namespace vlora::attention::VLORA_ISA

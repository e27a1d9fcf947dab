// Attention on vectors, for one instruction set.
#pragma once

#include "attention/attention_vector_tile.h"

namespace vlora::attention::VLORA_ISA {

// Distance in panels between the panel that is read and the one that is prefetched: kAheadBytes,
// but at most kMaxAhead panels.
constexpr int64_t kMaxAhead = 8, kAheadBytes = 8192;
// Number of panels that are read in rotation if memory is slower than the products. The hardware
// prefetches each panel as its own stream, which gives more bandwidth than one stream or software
// prefetch.
constexpr int64_t kStreams = 4;
// Number of heads between the panels that are read in rotation and those that are prefetched.
constexpr int64_t kHeadsAhead = 2;
// Number of queries in a tile, if the panels of values are read in rotation. It is small, so that
// the registers hold more columns of a row.
constexpr int kStreamQueries = kFullLines ? 4 : 2;

// Computes attention of a piece. Its queries are ordered by head of keys and values, then by row.
template <class T>
void attend(const Problem& p, const Piece& piece, float* scratch, float* partial) {
  const Plan& plan = *p.plan;
  const Layout& layout = plan.layout;
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  const int64_t group = plan.heads / layout.kv_heads, per_head = piece.rows * group;
  const int64_t heads = piece.kv_heads, queries = per_head * heads;
  const int64_t dim = layout.dim, padded = layout.padded(), page_panels = layout.panels();
  const int64_t first_position = chunk.start + piece.row;
  float* const q = scratch;
  float* const scores = q + plan.queries() * kQueryStride;
  float* const lane_sums = scores + plan.queries() * kScoreStride;
  float* const own = lane_sums + plan.queries() * R::kWidth;
  float* const maxima = partial ? partial : own;
  float* const sums = maxima + plan.queries();
  float* const out = sums + plan.queries();
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t row = chunk.row + piece.row + i % per_head / group;
    const int64_t head = (piece.kv_head + i / per_head) * group + i % group;
    rotate(p.q + row * p.q_stride + head * dim, p.cosines + row * (dim / 2),
           p.sines + row * (dim / 2), dim / 2, p.scale, q + i * kQueryStride);
    for (int64_t d = 0; d < padded; ++d) out[i * padded + d] = 0;
    maxima[i] = -INFINITY;
    R::zero().store(lane_sums + i * R::kWidth);
  }
  const int32_t* pages = plan.pages.data() + chunk.first_page;
  const T* const base = reinterpret_cast<const T*>(p.cache) + piece.kv_head * layout.head();
  const auto keys_of = [&](int64_t panel) {
    return base + pages[panel / page_panels] * layout.page + panel % page_panels * layout.panel();
  };
  // Number of queries in a tile. All tiles of a head have nearly the same height.
  const int64_t tile = ceil_div(per_head, ceil_div(per_head, int64_t(kMaxTileQueries)));
  const int64_t end_panel = piece.panel + piece.panels;
  // The lines of the next head's key and value are prefetched before a head's are written. Without
  // that, each store would wait for its line.
  const bool writes = chunk.length == 1 && piece.last();
  const auto slot_of = [&](int64_t h) { return Slot<T>(p, chunk, chunk.start, piece.kv_head + h); };
  const int64_t panel_bytes = layout.panel() * int64_t(sizeof(T));
  // Several panels are read in rotation if reading takes longer than multiplying. With more
  // products per byte, changing between panels costs more than it saves: then one panel is read,
  // and a panel far enough ahead is prefetched.
  const int64_t streams =
      heads > 1 && per_head <= (kFullLines ? 4 : int64_t(sizeof(T))) ? kStreams : 1;
  // Values in rotation would be added in another order than those of tall tiles.
  const bool interleaves = streams > 1 && !plan.fixed_order;
  const int64_t key_run = heads > 1 ? streams : kFullLines ? at_once(int(tile)) : 1;
  const int64_t value_run = heads == 1 ? kBlockPanels : interleaves ? streams : 1;
  const int64_t ahead =
      panel_bytes * kMaxAhead <= kAheadBytes ? kMaxAhead : ceil_div(kAheadBytes, panel_bytes);
  // Panels that are read in rotation are prefetched for a later head, because all heads of a page
  // are contiguous. This was measured on CPUs with AMX only.
  static const bool on_amx = runtime::runs_here(runtime::Isa::kAmx);
  const bool prefetches = on_amx && streams > 1 && heads > kHeadsAhead;
  const int64_t blocks = ceil_div(piece.panels, kBlockPanels);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = piece.panel + kBlockPanels * block;
    const int64_t count = std::min(kBlockPanels, piece.panel + piece.panels - begin);
    const T* keys[kBlockPanels];
    const Visible visible(layout, begin, count);
    for (int64_t j = 0; j < count; ++j) keys[j] = keys_of(begin + j);
    // The panels in the order in which they are read: keys of all panels and heads, then their
    // values, then the first keys of the next block.
    const T* order[(2 * kBlockPanels + kStreams) * kMaxHeads];
    const int64_t steps = count * heads;
    for (int64_t j = 0, step = 0; j < count; ++j)
      for (int64_t h = 0; h < heads; ++h, ++step) {
        order[step] = keys[j] + h * layout.head();
        order[steps + step] = order[step] + layout.values();
      }
    const int64_t following = std::min(kStreams, end_panel - begin - count);
    for (int64_t step = 0; step < std::max(kMaxAhead, kStreams * heads); ++step) {
      const int64_t panel = begin + count + step / heads;
      order[2 * steps + step] =
          panel < end_panel ? keys_of(panel) + step % heads * layout.head() : nullptr;
    }
    // For each tile of a head: the position of its last row, and the number of panels visible to
    // this row.
    int64_t last_position[kMaxTiles], seen[kMaxTiles];
    for (int64_t t = 0; t * tile < per_head; ++t) {
      const int64_t until = (t + 1) * tile < per_head ? (t + 1) * tile : per_head;
      last_position[t] = first_position + (until - 1) / group;
      seen[t] = visible.panels(last_position[t]);
    }
    const auto panels_of_head = [&](int64_t first, int64_t until, int64_t head, const T** to) {
      for (int64_t j = first; j < until; ++j) to[j - first] = order[j * heads + head];
    };
    const T* panels[kBlockPanels];
    // The panels that are prefetched while `panels` are read, which are panels [first, until) of
    // `order` for one head. The first heads of the next panels follow the last heads.
    const T* later[kBlockPanels];
    const auto find_later = [&](int64_t first, int64_t until, int64_t head) {
      const bool same = head + kHeadsAhead < heads;
      const int64_t at = same ? first : until, end = same ? until : 2 * count + following,
                    ahead = head + kHeadsAhead - (same ? 0 : heads);
      for (int64_t j = 0; j < until - first; ++j)
        later[j] = at + j < end ? order[(at + j) * heads + ahead] : panels[j];
    };
    const int64_t key_runs = ceil_div(count, key_run);
    for (int64_t r = 0; r < key_runs; ++r) {
      const int64_t j = r * key_run, until = std::min(count, j + key_run);
      for (int64_t h = 0; h < heads; ++h) {
        const char* prefetch =
            key_run > 1 ? nullptr : reinterpret_cast<const char*>(order[j * heads + h + ahead]);
        if (writes && begin + until == end_panel) {
          if (h + 1 < heads) prefetch_key(layout, slot_of(h + 1));
          write_key(layout, Stored<T>(p, chunk.row, piece.kv_head + h), slot_of(h));
        }
        panels_of_head(j, until, h, panels);
        if (prefetches) find_later(j, until, h);
        for (int64_t t = 0; t * tile < per_head; ++t) {
          if (j >= seen[t]) continue;
          const int64_t i = h * per_head + t * tile, left = per_head - t * tile;
          score_queries<T>(left < tile ? left : tile, q + i * kQueryStride, panels,
                           (seen[t] < until ? seen[t] : until) - j, dim,
                           scores + i * kScoreStride + j * kLanes, prefetch,
                           prefetches ? later : nullptr);
          prefetch = nullptr;
        }
      }
    }
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t position = first_position + i % per_head / group,
                    panel_count = seen[i % per_head / tile];
      float* const row = scores + i * kScoreStride;
      const int64_t valid = visible.mask(position, panel_count, layout.block, row);
      to_weights<false>(row, valid, panel_count * kLanes, maxima[i], lane_sums + i * R::kWidth,
                        out + i * padded, padded);
    }
    const int64_t value_runs = ceil_div(count, value_run);
    for (int64_t r = 0; r < value_runs; ++r) {
      const int64_t j = r * value_run, until = std::min(count, j + value_run);
      for (int64_t h = 0; h < heads; ++h) {
        const char* prefetch =
            value_run > 1 ? nullptr
                          : reinterpret_cast<const char*>(order[steps + j * heads + h + ahead]);
        if (writes && begin + until == end_panel) {
          if (h + 1 < heads) prefetch_values(layout, slot_of(h + 1), 1);
          write_value(layout, Stored<T>(p, chunk.row, piece.kv_head + h), slot_of(h));
        }
        panels_of_head(count + j, count + until, h, panels);
        if (prefetches) find_later(count + j, count + until, h);
        for (int64_t t = 0; t * tile < per_head; ++t) {
          const int64_t i = h * per_head + t * tile, left = per_head - t * tile;
          // Returns the number of a panel's tokens that the last row sees. Later tokens may belong
          // to another sequence.
          const auto tokens = [&](int64_t panel) {
            const int64_t there = last_position[t] + 1 - visible.position[panel];
            return there < visible.tokens[panel] ? there : visible.tokens[panel];
          };
          const int64_t end = seen[t] < until ? seen[t] : until;
          for (int64_t k = j; k < end;) {  // take panels with equally many tokens together
            const int64_t first = k, each = tokens(k);
            while (++k < end && tokens(k) == each) continue;
            const int64_t rows = left < tile ? left : tile;
            const float* const weights = scores + i * kScoreStride + first * kLanes;
            const T* const* const from = panels + (first - j);
            if (interleaves) {
              add_values_of_queries<T, kStreamQueries, true>(
                  rows, weights, from, k - first, each, padded, out + i * padded, nullptr,
                  prefetches ? later + (first - j) : nullptr);
            } else {
              add_values_of_queries<T, kMaxTileQueries, false>(rows, weights, from, k - first, each,
                                                               padded, out + i * padded, prefetch,
                                                               nullptr);
            }
            prefetch = nullptr;
          }
        }
      }
    }
  }
  for (int64_t i = 0; i < queries; ++i) sums[i] = sum_of(R::load(lane_sums + i * R::kWidth));
  if (partial) return;
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t head = (piece.kv_head + i / per_head) * group + i % group;
    float* to = p.y + (chunk.row + piece.row + i % per_head / group) * p.y_stride + head * dim;
    write_output(out + i * padded, 1 / sums[i], dim, to);
  }
}

}  // namespace vlora::attention::VLORA_ISA

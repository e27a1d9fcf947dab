// From segments to what the kernels compute: where the workspace's parts lie, which segments and
// adapters are sound, and which tile of which problem a block takes. Arithmetic only, the same on
// host and device.
//
// The rank-r intermediate of (wave, row) lies at low_row = wave * rows + row: segments of one wave
// share no rows, so that is one place for each row of each segment, however segments overlap.
#pragma once

#include "atmm_cuda.h"
#include "platform.cuh"

namespace vlora {

constexpr int kRankStep = 8;    // tensor cores read 16 bytes of 16-bit elements
constexpr int kSliceStep = 64;  // slices end on whole tiles of the deepest block

// Depth `d_in` cut in equal parts, none of them empty.
struct Slices {
  int count, depth;
};

VLORA_HD Slices cut(int d_in, int wanted) {
  const int depth = int(div_up(div_up(d_in, wanted), kSliceStep) * kSliceStep);
  return {int(div_up(d_in, depth)), depth};
}

// C [m, n] += alpha * A [m, k] B^T, B [n, k]; all row-major.
struct Problem {
  const void *a, *b;
  void *c;
  int64_t lda, ldb, ldc;
  int32_t m, n, k;
  float alpha;
};

// The problems of one grouped product, in the order of segments, then projections; `first[i]`
// tiles come before problem i, first[count] in all.
struct Group {
  Problem *problems;
  int32_t *first;
  int32_t count;
  int32_t block_rows, block_columns;
  Slices slices;
  int64_t slice_stride;  // elements of C
};

// Part of a problem that one block computes at a time.
struct Tile {
  int32_t problem, row, column, from, depth;
  int64_t offset;  // of C, elements: its slice's
};

VLORA_HD int64_t tiles_of(const Problem &p, int block_rows, int block_columns, int slices) {
  if (p.m <= 0 || p.n <= 0 || p.k <= 0) return 0;
  return div_up(p.m, block_rows) * div_up(p.n, block_columns) * slices;
}

// The problem that holds a tile: the last one with first <= tile. Empty problems hold none.
VLORA_HD int problem_of(const int32_t *first, int begin, int end, int tile) {
  while (end - begin > 1) {
    const int middle = begin + (end - begin) / 2;
    (first[middle] <= tile ? begin : end) = middle;
  }
  return begin;
}

VLORA_HD Tile tile_at(const Group &g, int begin, int end, int tile) {
  Tile t;
  t.problem = problem_of(g.first, begin, end, tile);
  const Problem &p = g.problems[t.problem];
  const int columns = int(div_up(p.n, g.block_columns));
  const int per_slice = columns * int(div_up(p.m, g.block_rows));
  const int local = tile - g.first[t.problem];
  const int slice = local / per_slice, rest = local % per_slice;
  t.row = rest / columns * g.block_rows;
  t.column = rest % columns * g.block_columns;
  t.from = slice * g.slices.depth;
  t.depth = int(least(g.slices.depth, p.k - t.from));
  t.offset = slice * g.slice_stride;
  return t;
}

struct Workspace {
  unsigned long long *fault;  // first, wherever the rest lies
  Group shrink, expand;
  float *partial;  // [slices, projections, waves * rows, max_rank]: unreduced shrink
  void *low;       // [projections, waves * rows, max_rank] in the call's type
  int64_t plane;   // elements of one slice
  int64_t bytes;
};

VLORA_HD int capacity_of(const VloraCall &call) { return call.wave_end[call.waves - 1]; }

inline Workspace lay_out(const VloraCall &call, const VloraTiles &tiles) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(call.workspace);
  uintptr_t at = begin;
  auto take = [&at](int64_t bytes) {
    const uintptr_t part = at;
    at += uintptr_t(div_up(bytes, 16) * 16);
    return reinterpret_cast<void *>(part);
  };
  const int count = capacity_of(call) * call.projection_count;
  auto group = [&] {
    Group g{};
    g.count = count;
    g.problems = static_cast<Problem *>(take(int64_t(sizeof(Problem)) * count));
    g.first = static_cast<int32_t *>(take(int64_t(sizeof(int32_t)) * (count + 1)));
    g.slices = {1, INT32_MAX};
    return g;
  };
  Workspace w;
  w.fault = static_cast<unsigned long long *>(take(16));
  w.shrink = group();
  w.expand = group();
  w.plane = int64_t(call.projection_count) * call.waves * call.rows * call.max_rank;
  const int rows = cut(call.d_in, tiles.row_slices).count;
  const int products = tiles.shrink == VLORA_ROWS ? 1 : cut(call.d_in, tiles.slices).count;
  w.partial = static_cast<float *>(
      take(w.plane * int64_t(sizeof(float)) * (rows > products ? rows : products)));
  w.low = take(w.plane * 2);
  w.bytes = int64_t(at - begin);
  return w;
}

VLORA_HD int wave_of(const VloraCall &call, int index) {
  int wave = 0;
  while (call.wave_end[wave] <= index) ++wave;
  return wave;
}

VLORA_HD int wave_begin(const VloraCall &call, int wave) {
  return wave == 0 ? 0 : call.wave_end[wave - 1];
}

// First element of the intermediate of a segment's row `row` (0: its first) in a slice.
VLORA_HD int64_t low_at(const VloraCall &call, int projection, int wave, int64_t row) {
  return ((int64_t(projection) * call.waves + wave) * call.rows + row) * call.max_rank;
}

VLORA_HD uint64_t fault_word(int code, int projection, int segment, int64_t value) {
  return uint64_t(code) << 58 | uint64_t(projection) << 52 | uint64_t(segment & 0xfffff) << 32 |
         uint32_t(value);
}

// What is wrong with a segment by itself, 0 if nothing.
VLORA_HD uint64_t fault_of(const VloraCall &call, const VloraSegment &s, int index) {
  if (s.start < 0 || s.length < 0 || int64_t(s.start) + s.length > call.rows)
    return fault_word(VLORA_FAULT_ROWS, 0, index, s.start);
  if (s.length == 0) return 0;
  if (s.length < call.shortest || s.length > call.longest)
    return fault_word(VLORA_FAULT_LENGTH, 0, index, s.length);
  if (s.slot < 0 || s.slot >= call.slots) return fault_word(VLORA_FAULT_SLOT, 0, index, s.slot);
  return s.sign == 1 || s.sign == -1 ? 0 : fault_word(VLORA_FAULT_SIGN, 0, index, s.sign);
}

// A segment as the kernels may use it: length 0 where it is empty or not sound, the latter with a
// word for the workspace.
struct CheckedSegment {
  VloraSegment segment;
  uint64_t fault;
};

VLORA_HD CheckedSegment segment_at(const VloraCall &call, int wave, int index) {
  VloraSegment s = call.segments[index];
  if (s.length == 0) return {s, 0};
  uint64_t fault = fault_of(call, s, index);
  if (fault == 0) {
    // The nearest before it that is not itself left out.
    int before = index - 1;
    while (before >= wave_begin(call, wave) && fault_of(call, call.segments[before], before))
      --before;
    if (before >= wave_begin(call, wave)) {
      const VloraSegment &b = call.segments[before];
      if (b.length == 0 || b.start + b.length > s.start)
        fault = fault_word(VLORA_FAULT_ORDER, 0, index, s.start);
    }
  }
  if (fault != 0) s.length = 0;
  return {s, fault};
}

// An adapter as the kernels may use it: rank 0 where the projection is not targeted or the adapter
// is not sound, the latter with a word for the workspace. tiles: for tensor cores.
struct CheckedAdapter {
  VloraAdapter adapter;
  uint64_t fault;
};

VLORA_HD CheckedAdapter adapter_at(const VloraCall &call, int projection, int index, int slot,
                                   bool tiles) {
  VloraAdapter found = call.projections[projection].adapters[slot];
  uint64_t fault = 0;
  if (found.a == nullptr) {
    found.rank = 0;
  } else if (found.b == nullptr) {
    fault = fault_word(VLORA_FAULT_NULL, projection, index, slot);
  } else if (found.rank < 1 || found.rank > call.max_rank) {
    fault = fault_word(VLORA_FAULT_RANK, projection, index, found.rank);
  } else if (tiles && found.rank % kRankStep != 0) {
    fault = fault_word(VLORA_FAULT_PADDING, projection, index, found.rank);
  } else if (tiles && !(aligned16(found.a) && aligned16(found.b))) {
    fault = fault_word(VLORA_FAULT_ALIGNMENT, projection, index, slot);
  }
  if (fault != 0) found.rank = 0;
  return {found, fault};
}

// Both products of one (segment, projection); empty ones where nothing is to be done by tiles.
struct Pair {
  Problem shrink, expand;
  uint64_t fault;
};

VLORA_HD Pair pair_at(const VloraCall &call, const Workspace &w, int i, int rows_up_to) {
  constexpr int kBytes = 2;  // tensor cores: fp16 and bf16 alike
  const int index = i / call.projection_count, projection = i % call.projection_count;
  const int wave = wave_of(call, index);
  Pair pair{};
  const CheckedSegment checked = segment_at(call, wave, index);
  const VloraSegment &s = checked.segment;
  pair.fault = checked.fault;
  if (s.length == 0 || s.length <= rows_up_to) return pair;
  const CheckedAdapter of = adapter_at(call, projection, index, s.slot, true);
  pair.fault = of.fault;
  if (of.adapter.rank == 0) return pair;
  const int rank = int(of.adapter.rank);
  const int64_t low = low_at(call, projection, wave, s.start);
  const VloraProjection &out = call.projections[projection];
  pair.shrink.a = static_cast<const char *>(call.x) + s.start * call.ldx * kBytes;
  pair.shrink.b = of.adapter.a;
  pair.shrink.c = w.partial + low;
  pair.shrink.lda = call.ldx;
  pair.shrink.ldb = call.d_in;
  pair.shrink.ldc = call.max_rank;
  pair.shrink.m = s.length;
  pair.shrink.n = rank;
  pair.shrink.k = call.d_in;
  pair.shrink.alpha = 1;
  pair.expand.a = static_cast<const char *>(w.low) + low * kBytes;
  pair.expand.b = of.adapter.b;
  pair.expand.c = static_cast<char *>(out.y) + s.start * out.ldy * kBytes;
  pair.expand.lda = call.max_rank;
  pair.expand.ldb = rank;
  pair.expand.ldc = out.ldy;
  pair.expand.m = s.length;
  pair.expand.n = int(out.d_out);
  pair.expand.k = rank;
  pair.expand.alpha = float(s.sign);
  return pair;
}

// Blocks that could find a tile, at most: for the grid of a launch that reads no segments.
inline int64_t most_tiles(const VloraCall &call, int block_rows, int block_columns, int64_t columns,
                          int slices, int segments) {
  const int64_t rows = least(int64_t(call.rows), int64_t(segments) * call.longest);
  const int64_t row_blocks = rows / block_rows + segments;
  return row_blocks * div_up(columns, block_columns) * slices * call.projection_count;
}

// How the row kernels share out a call: an item is a (segment, slice, projection, rank block) or a
// (segment, projection, column block), segments slowest.
struct RowWork {
  Slices slices;
  int up_to;         // longer segments are the tiles'
  int rank_blocks, column_blocks;
};

constexpr int kRowWarps = 8, kRowThreads = kRowWarps * kWarp;
constexpr int kRanksPerWarp = 2;
constexpr int kRanksPerBlock = kRowWarps * kRanksPerWarp;
constexpr int kColumnsPerBlock = kRowWarps * kWarp;

inline int64_t widest(const VloraCall &call) {
  int64_t found = 0;
  for (int p = 0; p < call.projection_count; ++p)
    if (call.projections[p].d_out > found) found = call.projections[p].d_out;
  return found;
}

inline RowWork row_work(const VloraCall &call, const VloraTiles &tiles) {
  RowWork work;
  work.slices = call.heads ? Slices{1, call.d_in} : cut(call.d_in, tiles.row_slices);
  work.up_to = tiles.shrink == VLORA_ROWS ? INT32_MAX : tiles.rows_up_to;
  work.rank_blocks = int(div_up(call.max_rank, kRanksPerBlock));
  work.column_blocks = int(div_up(widest(call), kColumnsPerBlock));
  return work;
}

// The next item of a block after one whose segment is empty: empty segments come last in their
// wave, so the rest of the wave is passed over.
VLORA_HD int64_t past_wave(int64_t item, int64_t step, int64_t end) {
  return item + div_up(end - item, step) * step;
}

}  // namespace vlora

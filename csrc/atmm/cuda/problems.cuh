// The arithmetic that relates segments to the work of the kernels: the layout of the workspace, the
// validity of segments and adapters, and the tile that a block computes. Host and device share it.
//
// "low" is the low-rank intermediate. Its row for (wave, row) is wave * rows + row. The segments of
// a wave share no rows, so each row of each segment has its own, even if segments overlap.
#pragma once

#include "atmm_cuda.h"
#include "platform.cuh"

namespace vlora {

constexpr int kRankStep = 8;    // elements of 16 bits in the 16 bytes that tensor cores read
constexpr int kSliceStep = 64;  // depth of the deepest block: slices are a multiple of it

// `count` slices of the depth, each `depth` long except the last.
struct Slices {
  int count, depth;
};

// Divides the depth into at most `max_count` equal slices, none of them empty.
VLORA_HD Slices slices_of(int d_in, int max_count) {
  const int depth = int(div_up(div_up(d_in, max_count), kSliceStep) * kSliceStep);
  return {int(div_up(d_in, depth)), depth};
}

// C += alpha * A B^T, with A [m, k], B [n, k] and C [m, n], all row-major.
struct Problem {
  const void *a, *b;
  void* c;
  int64_t lda, ldb, ldc;
  int32_t m, n, k;
  float alpha;
};

// The problems of one grouped product, ordered by segment, then by projection. first[i] is the
// number of tiles before problem i, first[count] the number of all tiles.
struct Group {
  Problem* problems;
  int32_t* first;
  int32_t count;
  int32_t block_rows, block_columns;
  Slices slices;
  int64_t slice_stride;  // elements of C between slices
};

// The part of a problem that a block computes at a time.
struct Tile {
  int32_t problem, row, column;
  int32_t from, depth;  // its slice of the depth
  int64_t offset;       // of the slice in C, in elements
};

VLORA_HD int64_t tiles_of(const Problem& p, int block_rows, int block_columns, int slices) {
  if (p.m <= 0 || p.n <= 0 || p.k <= 0) return 0;
  return div_up(p.m, block_rows) * div_up(p.n, block_columns) * slices;
}

// Returns the problem that contains a tile: the last one with first <= tile, which is never empty.
// The lanes of a warp search together, so that 1024 problems take two dependent reads.
__device__ inline int problem_of(const int32_t* first, int begin, int end, int tile) {
  const int lane = int(threadIdx.x) % kWarp;
  while (end - begin > 1) {
    const int step = int(div_up(end - begin, kWarp)), at = begin + lane * step;
    // `first` ascends, so the condition holds for the first lanes.
    begin += (count_lanes(at < end && first[at] <= tile) - 1) * step;
    end = int(min64(end, begin + step));
  }
  return begin;
}

// All lanes of a warp must call it.
__device__ inline Tile tile_at(const Group& g, int begin, int end, int tile) {
  Tile t;
  t.problem = problem_of(g.first, begin, end, tile);
  const Problem& p = g.problems[t.problem];
  const int columns = int(div_up(p.n, g.block_columns));
  const int per_slice = columns * int(div_up(p.m, g.block_rows));
  const int index = tile - g.first[t.problem];
  const int slice = index / per_slice, index_in_slice = index % per_slice;
  t.row = index_in_slice / columns * g.block_rows;
  t.column = index_in_slice % columns * g.block_columns;
  t.from = slice * g.slices.depth;
  t.depth = int(min64(g.slices.depth, p.k - t.from));
  t.offset = slice * g.slice_stride;
  return t;
}

// Progress of fused_kernel (fused.cu). All counters are 0 between launches.
struct Counters {
  unsigned ticket;    // next ticket
  unsigned left;      // blocks that found no ticket
  unsigned expanded;  // complete tickets of the first wave's expand
  unsigned reserved;
  unsigned shrunk[VLORA_FUSED_SEGMENTS];  // complete shrink tickets of each segment
};

constexpr int kFusedWaves = 2;  // a row's own segment and its -live segment
static_assert(16 + sizeof(Counters) == VLORA_HEADER_BYTES, "the caller zeroes the header");

struct Workspace {
  unsigned long long* fault;  // the workspace's first 8 bytes
  Counters* counters;
  Group shrink, expand;
  float* partial;  // [slices, projections, waves * rows, max_rank]: the slices of the shrink
  void* low;       // [projections, waves * rows, max_rank] in the call's type
  int64_t plane;   // elements of one slice
  int64_t bytes;   // of the whole workspace
};

// Number of segments that the call has memory for, empty ones included.
VLORA_HD int capacity_of(const VloraCall& call) { return call.wave_end[call.waves - 1]; }

inline Workspace workspace_of(const VloraCall& call, const VloraTiles& tiles) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(call.workspace);
  uintptr_t end = begin;
  auto take = [&end](int64_t bytes) {
    const uintptr_t part = end;
    end += uintptr_t(div_up(bytes, 16) * 16);
    return reinterpret_cast<void*>(part);
  };
  const int count = capacity_of(call) * call.projection_count;
  auto group = [&] {
    Group g{};
    g.count = count;
    g.problems = static_cast<Problem*>(take(int64_t(sizeof(Problem)) * count));
    g.first = static_cast<int32_t*>(take(int64_t(sizeof(int32_t)) * (count + 1)));
    g.slices = {1, INT32_MAX};
    return g;
  };
  Workspace w;
  w.fault = static_cast<unsigned long long*>(take(16));
  w.counters = static_cast<Counters*>(take(sizeof(Counters)));
  w.shrink = group();
  w.expand = group();
  w.plane = int64_t(call.projection_count) * call.waves * call.rows * call.max_rank;
  const int row_slices = slices_of(call.d_in, tiles.row_slices).count;
  const int tile_slices = tiles.shrink == VLORA_ROWS ? 1 : slices_of(call.d_in, tiles.slices).count;
  const int slices = row_slices > tile_slices ? row_slices : tile_slices;
  w.partial = static_cast<float*>(take(w.plane * int64_t(sizeof(float)) * slices));
  w.low = take(w.plane * 2);
  w.bytes = int64_t(end - begin);
  return w;
}

VLORA_HD int wave_of(const VloraCall& call, int index) {
  int wave = 0;
  while (call.wave_end[wave] <= index) ++wave;
  return wave;
}

VLORA_HD int wave_begin(const VloraCall& call, int wave) {
  return wave == 0 ? 0 : call.wave_end[wave - 1];
}

// Returns the offset, in elements, of a row of x in a slice of the intermediate.
VLORA_HD int64_t low_offset(const VloraCall& call, int projection, int wave, int64_t row) {
  return ((int64_t(projection) * call.waves + wave) * call.rows + row) * call.max_rank;
}

VLORA_HD uint64_t fault_word(int code, int projection, int segment, int64_t value) {
  return uint64_t(code) << 58 | uint64_t(projection) << 52 | uint64_t(segment & 0xfffff) << 32 |
         uint32_t(value);
}

// Returns the fault of a segment regardless of the others, or 0.
VLORA_HD uint64_t fault_of(const VloraCall& call, const VloraSegment& s, int index) {
  if (s.start < 0 || s.length < 0 || int64_t(s.start) + s.length > call.rows)
    return fault_word(VLORA_FAULT_ROWS, 0, index, s.start);
  if (s.length == 0) return 0;
  if (s.length < call.shortest || s.length > call.longest)
    return fault_word(VLORA_FAULT_LENGTH, 0, index, s.length);
  if (s.slot < 0 || s.slot >= call.slots) return fault_word(VLORA_FAULT_SLOT, 0, index, s.slot);
  return s.sign == 1 || s.sign == -1 ? 0 : fault_word(VLORA_FAULT_SIGN, 0, index, s.sign);
}

// A segment as the kernels use it, with length 0 if it is empty or invalid. An invalid segment has
// a fault word for the workspace.
struct CheckedSegment {
  VloraSegment segment;
  uint64_t fault;
};

VLORA_HD CheckedSegment segment_at(const VloraCall& call, int wave, int index) {
  VloraSegment s = call.segments[index];
  if (s.length == 0) return {s, 0};
  uint64_t fault = fault_of(call, s, index);
  if (fault == 0) {
    // Compare it with the nearest earlier segment that is not skipped.
    int before = index - 1;
    while (before >= wave_begin(call, wave) && fault_of(call, call.segments[before], before))
      --before;
    if (before >= wave_begin(call, wave)) {
      const VloraSegment& b = call.segments[before];
      if (b.length == 0 || b.start + b.length > s.start)
        fault = fault_word(VLORA_FAULT_ORDER, 0, index, s.start);
    }
  }
  if (fault != 0) s.length = 0;
  return {s, fault};
}

// An adapter as the kernels use it, with rank 0 if the projection is not targeted or the adapter is
// invalid. An invalid adapter has a fault word for the workspace.
struct CheckedAdapter {
  VloraAdapter adapter;
  uint64_t fault;
};

// tiles: whether tensor cores will read the adapter.
VLORA_HD CheckedAdapter adapter_at(const VloraCall& call, int projection, int index, int slot,
                                   bool tiles) {
  VloraAdapter adapter = call.projections[projection].adapters[slot];
  uint64_t fault = 0;
  if (adapter.a == nullptr) {
    adapter.rank = 0;
  } else if (adapter.b == nullptr) {
    fault = fault_word(VLORA_FAULT_NULL, projection, index, slot);
  } else if (adapter.rank < 1 || adapter.rank > call.max_rank) {
    fault = fault_word(VLORA_FAULT_RANK, projection, index, adapter.rank);
  } else if (tiles && adapter.rank % kRankStep != 0) {
    fault = fault_word(VLORA_FAULT_PADDING, projection, index, adapter.rank);
  } else if (tiles && !(aligned16(adapter.a) && aligned16(adapter.b))) {
    fault = fault_word(VLORA_FAULT_ALIGNMENT, projection, index, slot);
  }
  if (fault != 0) adapter.rank = 0;
  return {adapter, fault};
}

// Both products of one (segment, projection). They are empty if tiles have nothing to compute.
struct ProblemPair {
  Problem shrink, expand;
  uint64_t fault;
};

VLORA_HD ProblemPair problems_at(const VloraCall& call, const Workspace& w, int i, int rows_up_to) {
  constexpr int kBytes = 2;  // of an element of fp16 or bf16: tiles take no other types
  const int index = i / call.projection_count, projection = i % call.projection_count;
  const int wave = wave_of(call, index);
  ProblemPair pair{};
  const CheckedSegment checked = segment_at(call, wave, index);
  const VloraSegment& s = checked.segment;
  pair.fault = checked.fault;
  if (s.length == 0 || s.length <= rows_up_to) return pair;
  const CheckedAdapter checked_adapter = adapter_at(call, projection, index, s.slot, true);
  pair.fault = checked_adapter.fault;
  if (checked_adapter.adapter.rank == 0) return pair;
  const int rank = int(checked_adapter.adapter.rank);
  const int64_t low = low_offset(call, projection, wave, s.start);
  const VloraProjection& out = call.projections[projection];
  pair.shrink.a = static_cast<const char*>(call.x) + s.start * call.ldx * kBytes;
  pair.shrink.b = checked_adapter.adapter.a;
  pair.shrink.c = w.partial + low;
  pair.shrink.lda = call.ldx;
  pair.shrink.ldb = call.d_in;
  pair.shrink.ldc = call.max_rank;
  pair.shrink.m = s.length;
  pair.shrink.n = rank;
  pair.shrink.k = call.d_in;
  pair.shrink.alpha = 1;
  pair.expand.a = static_cast<const char*>(w.low) + low * kBytes;
  pair.expand.b = checked_adapter.adapter.b;
  pair.expand.c = static_cast<char*>(out.y) + s.start * out.ldy * kBytes;
  pair.expand.lda = call.max_rank;
  pair.expand.ldb = rank;
  pair.expand.ldc = out.ldy;
  pair.expand.m = s.length;
  pair.expand.n = int(out.d_out);
  pair.expand.k = rank;
  pair.expand.alpha = float(s.sign);
  return pair;
}

// Returns an upper bound of the number of tiles. With it the host sizes a grid without reading the
// segments.
inline int64_t max_tiles(const VloraCall& call, int block_rows, int block_columns, int64_t columns,
                         int slices, int segments) {
  const int64_t rows = min64(int64_t(call.rows), int64_t(segments) * call.longest);
  const int64_t row_blocks = rows / block_rows + segments;
  return row_blocks * div_up(columns, block_columns) * slices * call.projection_count;
}

// The division of a call among the row kernels. An item of the shrink is a (segment, slice,
// projection, rank block), an item of the expand a (segment, projection, column block). Segments
// vary slowest.
struct RowWork {
  Slices slices;
  int up_to;                       // maximum rows of a segment; tiles compute longer ones
  int rank_blocks, column_blocks;  // column_blocks: of all projections
  int first_column_block[VLORA_MAX_PROJECTIONS];
};

constexpr int kRowWarps = 8, kRowThreads = kRowWarps * kWarp;
constexpr int kRanksPerWarp = 2;
constexpr int kRanksPerBlock = kRowWarps * kRanksPerWarp;
constexpr int kColumnsPerBlock = kRowWarps * kWarp;

inline int64_t max_d_out(const VloraCall& call) {
  int64_t result = 0;
  for (int p = 0; p < call.projection_count; ++p)
    if (call.projections[p].d_out > result) result = call.projections[p].d_out;
  return result;
}

inline RowWork row_work(const VloraCall& call, const VloraTiles& tiles) {
  RowWork work;
  work.slices = call.heads ? Slices{1, call.d_in} : slices_of(call.d_in, tiles.row_slices);
  work.up_to = tiles.shrink == VLORA_ROWS ? INT32_MAX : tiles.rows_up_to;
  work.rank_blocks = int(div_up(call.max_rank, kRanksPerBlock));
  work.column_blocks = 0;
  for (int p = 0; p < VLORA_MAX_PROJECTIONS; ++p) {
    work.first_column_block[p] = work.column_blocks;
    if (p < call.projection_count)
      work.column_blocks += int(div_up(call.projections[p].d_out, kColumnsPerBlock));
  }
  return work;
}

// Returns the item after the rest of the wave, given an item with an empty segment. Empty segments
// come last in their wave.
VLORA_HD int64_t first_after_wave(int64_t item, int64_t step, int64_t end) {
  return item + div_up(end - item, step) * step;
}

}  // namespace vlora

// The parts of the row kernels (rows.cu, fused.cu), which serve decode, and problems that tensor
// cores do not accept (fp32, odd or unaligned sizes).
//
// With few rows per segment, a tile of 16 rows would be mostly padding, and bandwidth is the limit.
// Both products read an adapter once for every R rows, in coalesced loads of 16 bytes. The depth of
// the shrink is divided into slices, so that few segments still fill the device. The expand sums
// the slices, in order, when it reads them.
#pragma once

#include "kernels.cuh"

namespace vlora {

// A part of the shrink: one rank block and depth slice of a (segment, projection). `first_row` and
// `row_step` divide the rows of the segment among several blocks.
struct ShrinkItem {
  int index;  // of the segment
  int slice, projection, rank_block;
  int first_row, row_step;
};

// Returns item number `item` of those of a segment.
__device__ __forceinline__ ShrinkItem shrink_item_at(const VloraCall& call, const RowWork& work,
                                                     int index, int item) {
  ShrinkItem result{};
  result.index = index;
  result.rank_block = item % work.rank_blocks;
  result.projection = item / work.rank_blocks % call.projection_count;
  result.slice = item / work.rank_blocks / call.projection_count;
  return result;
}

// Computes low[slice, row, j] = x[row] · A[j] over the slice's depth. Each warp takes two ranks.
// For heads it computes y[row, j] = x[row] · A[j] + bias[j].
template <typename T, int R>
__device__ void shrink(const VloraCall& call, const Workspace& w, const RowWork& work,
                       const ShrinkItem& item, int wave, const CheckedSegment& checked) {
  constexpr int kStep = kVector<T>;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int projection = item.projection, slice = item.slice;
  const T* const all_x = static_cast<const T*>(call.x);
  const bool aligned_x = aligned16(call.x) && call.ldx % kStep == 0 && call.d_in % kStep == 0;
  const VloraSegment s = checked.segment;
  const bool reports_faults =
      threadIdx.x == 0 && item.rank_block == 0 && slice == 0 && item.first_row == 0;
  if (checked.fault != 0 && reports_faults) record_fault(w, checked.fault);
  if (s.length == 0 || s.length > work.up_to) return;
  const CheckedAdapter checked_adapter = adapter_at(call, projection, item.index, s.slot, false);
  if (checked_adapter.fault != 0 && reports_faults) record_fault(w, checked_adapter.fault);
  const int rank = int(checked_adapter.adapter.rank);
  const int j = item.rank_block * kRanksPerBlock + warp * kRanksPerWarp;
  if (j >= rank) return;  // the same for all lanes of the warp
  const T* const a0 = static_cast<const T*>(checked_adapter.adapter.a) + int64_t(j) * call.d_in;
  const T* const a1 = j + 1 < rank ? a0 + call.d_in : a0;
  const int from = slice * work.slices.depth;
  const int to = int(min64(int64_t(from) + work.slices.depth, call.d_in));
  const bool aligned = aligned_x && aligned16(checked_adapter.adapter.a);
  for (int r = item.first_row; r < s.length; r += item.row_step) {
    const T* x[R];
#pragma unroll
    for (int i = 0; i < R; ++i) x[i] = all_x + (s.start + min64(r + i, s.length - 1)) * call.ldx;
    float sums[R * kRanksPerWarp] = {};
    if (aligned) {
#pragma unroll 2
      for (int k = from + lane * kStep; k < to; k += kWarp * kStep) {
        float p0[kStep], p1[kStep];
        load16(a0 + k, p0);
        load16(a1 + k, p1);
#pragma unroll
        for (int i = 0; i < R; ++i) {
          float q[kStep];
          load16(x[i] + k, q);
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            sums[2 * i] += q[e] * p0[e];
            sums[2 * i + 1] += q[e] * p1[e];
          }
        }
      }
    } else {
      for (int k = from + lane; k < to; k += kWarp) {
        const float p0 = to_float(a0[k]), p1 = to_float(a1[k]);
#pragma unroll
        for (int i = 0; i < R; ++i) {
          const float q = to_float(x[i][k]);
          sums[2 * i] += q * p0;
          sums[2 * i + 1] += q * p1;
        }
      }
    }
    sum_lanes(sums, kWarp);
    if (lane != 0) continue;
#pragma unroll
    for (int i = 0; i < R * kRanksPerWarp; ++i) {
      const int row = r + i / kRanksPerWarp, rank_index = j + i % kRanksPerWarp;
      if (row >= s.length || rank_index >= rank) continue;
      if (call.heads) {
        const VloraProjection& out = call.projections[projection];
        static_cast<float*>(out.y)[(s.start + row) * out.ldy + rank_index] =
            sums[i] + static_cast<const float*>(checked_adapter.adapter.b)[rank_index];
      } else {
        const int64_t low = low_offset(call, projection, wave, s.start + row);
        w.partial[slice * w.plane + low + rank_index] = sums[i];
      }
    }
  }
}

// A part of the expand: a column block of a segment. `block` counts those of all projections.
struct ExpandItem {
  int index;  // of the segment
  int block;
  int first_row, row_step;
};

// Computes y[row, c] += sign * low[row] · B[c]. A warp takes 32 neighbouring columns. Groups of
// `lanes` of its lanes compute one column at a time, so that they read adjacent 16-byte pieces of
// B. Each lane multiplies the same piece of all columns, and keeps the sum of the column that it
// writes. All threads of the block must call it, with its shared memory `low` of [R, max_rank].
template <typename T, int R, typename Low>
__device__ void expand(const VloraCall& call, const Workspace& w, const RowWork& work,
                       const ExpandItem& item, int wave, const VloraSegment& s, Low low) {
  constexpr int kStep = kVector<T>;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  int projection = 0, first_block = 0;
  // Constant indices keep `work` out of local memory.
#pragma unroll
  for (int p = 1; p < VLORA_MAX_PROJECTIONS; ++p) {
    const int block = work.first_column_block[p];
    const bool reached = p < call.projection_count && block <= item.block;
    projection += reached;
    first_block = reached ? block : first_block;
  }
  const int64_t column = int64_t(item.block - first_block) * kColumnsPerBlock + warp * kWarp + lane;
  const CheckedAdapter checked_adapter = adapter_at(call, projection, item.index, s.slot, false);
  const int rank = int(checked_adapter.adapter.rank);
  if (rank == 0) return;
  const VloraProjection& out = call.projections[projection];
  const bool aligned = rank % kStep == 0 && aligned16(checked_adapter.adapter.b);
  const int pieces = aligned ? rank / kStep : rank;
  int lanes = 1;
  while (lanes < kWarp && lanes < pieces) lanes *= 2;
  const int member = lane % lanes;
  const int64_t group_column = column - member;  // first column of this group of lanes
  for (int r = item.first_row; r < s.length; r += item.row_step) {
    __syncthreads();  // all threads have read the previous iteration's `low`
    for (int i = int(threadIdx.x); i < R * rank; i += kRowThreads) {
      const int row = r + i / rank, rank_index = i % rank;
      float sum = 0;
      if (row < s.length) {
        const int64_t offset = low_offset(call, projection, wave, s.start + row) + rank_index;
        for (int slice = 0; slice < work.slices.count; ++slice)
          sum += w.partial[slice * w.plane + offset];
      }
      low[i / rank * call.max_rank + rank_index] = sum * float(s.sign);
    }
    __syncthreads();
    float results[R] = {};
    // One iteration, except for ranks of more than 32 pieces.
    for (int first = 0; first < pieces; first += lanes) {
      const int piece = first + member;
      float part[R][kStep] = {};  // of `low`
      if (piece < pieces) {
        const int values = aligned ? kStep : 1;
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
          for (int e = 0; e < kStep; ++e)
            if (e < values) part[i][e] = low[i * call.max_rank + piece * values + e];
      }
#pragma unroll 4
      for (int c = 0; c < lanes; ++c) {
        float sums[R] = {};
        if (piece < pieces && group_column + c < out.d_out) {
          const T* const b =
              static_cast<const T*>(checked_adapter.adapter.b) + (group_column + c) * rank;
          float q[kStep] = {};
          if (aligned) {
            load16(b + piece * kStep, q);
          } else {
            q[0] = to_float(b[piece]);
          }
#pragma unroll
          for (int i = 0; i < R; ++i)
#pragma unroll
            for (int e = 0; e < kStep; ++e) sums[i] += q[e] * part[i][e];
        }
        sum_lanes(sums, lanes);
#pragma unroll
        for (int i = 0; i < R; ++i)
          if (c == member) results[i] += sums[i];
      }
    }
    if (column >= out.d_out) continue;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      if (r + i >= s.length) continue;
      T* const y = static_cast<T*>(out.y) + (s.start + r + i) * out.ldy + column;
      *y = from_float<T>(to_float(*y) + results[i]);
    }
  }
}

}  // namespace vlora

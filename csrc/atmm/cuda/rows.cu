// The row kernels: decoding, and whatever tensor cores do not take (fp32, odd or unaligned sizes).
// With few rows a segment a tile of 16 rows would be mostly padding, and the matter is bandwidth:
// both kernels read each adapter byte once for every R rows, in 16-byte loads that neighbouring
// lanes coalesce, and the depth of the shrink is cut in slices so that few segments still fill the
// device. The slices are summed where the expand reads them, in order.
#include "kernels.cuh"

namespace vlora {
namespace {

// low[slice, row, j] = x[row] · A[j] over the slice's depth; each warp takes two ranks.
// Heads: y[row, j] = x[row] · A[j] + bias[j].
template <typename T, int R>
__global__ void __launch_bounds__(kRowThreads) shrink_kernel(VloraCall call, Workspace w,
                                                             RowWork work) {
  constexpr int kStep = kVector<T>;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t per_segment =
      int64_t(work.slices.count) * call.projection_count * work.rank_blocks;
  const T *const all_x = static_cast<const T *>(call.x);
  const bool aligned_x = aligned16(call.x) && call.ldx % kStep == 0 && call.d_in % kStep == 0;
  const int64_t items = capacity_of(call) * per_segment;
  for (int64_t item = blockIdx.x; item < items;) {
    const int index = int(item / per_segment);
    int rest = int(item % per_segment);
    const int rank_block = rest % work.rank_blocks;
    rest /= work.rank_blocks;
    const int projection = rest % call.projection_count, slice = rest / call.projection_count;
    const int wave = wave_of(call, index);
    const CheckedSegment checked = segment_at(call, wave, index);
    const VloraSegment s = checked.segment;
    if (s.length == 0 && checked.fault == 0) {
      item = past_wave(item, gridDim.x, call.wave_end[wave] * per_segment);
      continue;
    }
    item += gridDim.x;
    const bool speaks = threadIdx.x == 0 && rank_block == 0 && slice == 0 && blockIdx.y == 0;
    if (checked.fault != 0 && speaks) note(w, checked.fault);
    if (s.length == 0 || s.length > work.up_to) continue;
    const CheckedAdapter of = adapter_at(call, projection, index, s.slot, false);
    if (of.fault != 0 && speaks) note(w, of.fault);
    const int rank = int(of.adapter.rank);
    const int j = rank_block * kRanksPerBlock + warp * kRanksPerWarp;
    if (j >= rank) continue;  // the whole warp
    const T *const a0 = static_cast<const T *>(of.adapter.a) + int64_t(j) * call.d_in;
    const T *const a1 = j + 1 < rank ? a0 + call.d_in : a0;
    const int from = slice * work.slices.depth;
    const int to = int(least(int64_t(from) + work.slices.depth, call.d_in));
    const bool aligned = aligned_x && aligned16(of.adapter.a);
    for (int r = int(blockIdx.y) * R; r < s.length; r += int(gridDim.y) * R) {
      const T *x[R];
#pragma unroll
      for (int i = 0; i < R; ++i)
        x[i] = all_x + (s.start + least(r + i, s.length - 1)) * call.ldx;
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
        const int row = r + i / kRanksPerWarp, at = j + i % kRanksPerWarp;
        if (row >= s.length || at >= rank) continue;
        if (call.heads) {
          const VloraProjection &out = call.projections[projection];
          static_cast<float *>(out.y)[(s.start + row) * out.ldy + at] =
              sums[i] + static_cast<const float *>(of.adapter.b)[at];
        } else {
          w.partial[slice * w.plane + low_at(call, projection, wave, s.start + row) + at] = sums[i];
        }
      }
    }
  }
}

// y[row, c] += sign * low[row] · B[c] for the rows of one wave. A warp takes 32 neighbouring
// columns; `lanes` of its lanes share one at a time, so that they read consecutive pieces of 16
// bytes of B, and each lane keeps the sum of the column that it then writes.
template <typename T, int R>
__global__ void __launch_bounds__(kRowThreads) expand_kernel(VloraCall call, Workspace w,
                                                             RowWork work, int wave) {
  constexpr int kStep = kVector<T>;
  VLORA_SHARED(float, low);  // [R, max_rank]
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int begin = wave_begin(call, wave);
  const int64_t per_segment = int64_t(call.projection_count) * work.column_blocks;
  const int64_t items = (call.wave_end[wave] - begin) * per_segment;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int index = begin + int(item / per_segment);
    const int projection = int(item % per_segment) / work.column_blocks;
    const int64_t column =
        int64_t(item % work.column_blocks) * kColumnsPerBlock + warp * kWarp + lane;
    const CheckedSegment checked = segment_at(call, wave, index);
    const VloraSegment s = checked.segment;
    if (s.length == 0 && checked.fault == 0) return;  // the rest of the wave is empty
    if (s.length == 0 || s.length > work.up_to) continue;
    const CheckedAdapter of = adapter_at(call, projection, index, s.slot, false);
    const int rank = int(of.adapter.rank);
    if (rank == 0) continue;
    const VloraProjection &out = call.projections[projection];
    const bool aligned = rank % kStep == 0 && aligned16(of.adapter.b);
    const int pieces = aligned ? rank / kStep : rank;
    int lanes = 1;
    while (lanes < kWarp && lanes < pieces) lanes *= 2;
    const int member = lane % lanes;
    const int64_t group_column = column - member;  // the first of this group's `lanes` columns
    for (int r = int(blockIdx.y) * R; r < s.length; r += int(gridDim.y) * R) {
      __syncthreads();  // before `low` of the last turn is written over
      for (int i = int(threadIdx.x); i < R * rank; i += kRowThreads) {
        const int row = r + i / rank, at = i % rank;
        float sum = 0;
        if (row < s.length) {
          const int64_t place = low_at(call, projection, wave, s.start + row) + at;
          for (int slice = 0; slice < work.slices.count; ++slice)
            sum += w.partial[slice * w.plane + place];
        }
        low[i / rank * call.max_rank + at] = sum * float(s.sign);
      }
      __syncthreads();
      float kept[R] = {};
#pragma unroll 4
      for (int turn = 0; turn < lanes; ++turn) {
        float sums[R] = {};
        if (group_column + turn < out.d_out) {
          const T *const b = static_cast<const T *>(of.adapter.b) + (group_column + turn) * rank;
          for (int piece = member; piece < pieces; piece += lanes) {
            if (aligned) {
              float q[kStep];
              load16(b + piece * kStep, q);
#pragma unroll
              for (int i = 0; i < R; ++i)
#pragma unroll
                for (int e = 0; e < kStep; ++e)
                  sums[i] += q[e] * low[i * call.max_rank + piece * kStep + e];
            } else {
              const float q = to_float(b[piece]);
#pragma unroll
              for (int i = 0; i < R; ++i) sums[i] += q * low[i * call.max_rank + piece];
            }
          }
        }
        sum_lanes(sums, lanes);
#pragma unroll
        for (int i = 0; i < R; ++i)
          if (turn == member) kept[i] = sums[i];
      }
      if (column >= out.d_out) continue;
#pragma unroll
      for (int i = 0; i < R; ++i) {
        if (r + i >= s.length) continue;
        T *const y = static_cast<T *>(out.y) + (s.start + r + i) * out.ldy + column;
        *y = from_float<T>(to_float(*y) + kept[i]);
      }
    }
  }
}

using Shrink = void (*)(VloraCall, Workspace, RowWork);
using Expand = void (*)(VloraCall, Workspace, RowWork, int);

template <int R>
Shrink shrink_of(int type) {
  if (type == VLORA_FP32) return shrink_kernel<float, R>;
  return type == VLORA_FP16 ? shrink_kernel<Half, R> : shrink_kernel<Bfloat, R>;
}

template <int R>
Expand expand_of(int type) {
  if (type == VLORA_FP32) return expand_kernel<float, R>;
  return type == VLORA_FP16 ? expand_kernel<Half, R> : expand_kernel<Bfloat, R>;
}

// Segments' items along x, their row blocks along y.
dim3 grid_of(const VloraCall &call, int64_t items, int row_block, int up_to, int resident) {
  constexpr int kTurns = 4;  // blocks for every place on the device: they are of unequal length
  const int64_t rows = div_up(least(call.longest, up_to), row_block);
  const int64_t x = least(items, int64_t(kTurns) * resident);
  const int64_t y = least(rows, div_up(int64_t(kTurns) * resident, x));
  return dim3(unsigned(x), unsigned(y));
}

}  // namespace

cudaError_t warm_rows(int *resident) {
  cudaError_t error = cudaSuccess;
  int least_resident = INT32_MAX;
  for (int type : {VLORA_FP16, VLORA_BF16, VLORA_FP32}) {
    for (Shrink kernel : {shrink_of<1>(type), shrink_of<4>(type)}) {
      if (error == cudaSuccess) error = warm(kernel, kRowThreads, 0, resident);
      least_resident = int(least(least_resident, *resident));
    }
    for (Expand kernel : {expand_of<1>(type), expand_of<4>(type)}) {
      if (error == cudaSuccess) error = warm(kernel, kRowThreads, 0, resident);
      least_resident = int(least(least_resident, *resident));
    }
  }
  *resident = least_resident;
  return error;
}

int rows_shared_bytes(const VloraCall &call, int row_block) {
  return row_block * call.max_rank * int(sizeof(float));
}

cudaError_t shrink_rows(const VloraCall &call, const Workspace &w, const RowWork &work,
                        int row_block, int resident, cudaStream_t stream) {
  const int64_t items = int64_t(capacity_of(call)) * work.slices.count * call.projection_count *
                        work.rank_blocks;
  const dim3 grid = grid_of(call, items, row_block, work.up_to, resident);
  return launch(row_block == 1 ? shrink_of<1>(call.type) : shrink_of<4>(call.type), grid,
                kRowThreads, 0, stream, call, w, work);
}

cudaError_t expand_rows(const VloraCall &call, const Workspace &w, const RowWork &work,
                        int row_block, int wave, int resident, cudaStream_t stream) {
  const int64_t items = int64_t(call.wave_end[wave] - wave_begin(call, wave)) *
                        call.projection_count * work.column_blocks;
  if (items == 0) return cudaSuccess;
  const dim3 grid = grid_of(call, items, row_block, work.up_to, resident);
  return launch(row_block == 1 ? expand_of<1>(call.type) : expand_of<4>(call.type), grid,
                kRowThreads, size_t(rows_shared_bytes(call, row_block)), stream, call, w, work,
                wave);
}

}  // namespace vlora

// The row kernels: for decode, and for problems that tensor cores do not accept (fp32, odd or
// unaligned sizes).
//
// With few rows per segment, a tile of 16 rows would be mostly padding, and bandwidth is the limit.
// Both kernels read an adapter once for every R rows, in coalesced loads of 16 bytes. The depth of
// the shrink is divided into slices, so that few segments still fill the device. The expand sums
// the slices, in order, when it reads them.
#include "kernels.cuh"

namespace vlora {
namespace {

// Computes low[slice, row, j] = x[row] · A[j] over the slice's depth. Each warp takes two ranks.
// For heads it computes y[row, j] = x[row] · A[j] + bias[j].
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
    const int item_in_segment = int(item % per_segment);
    const int rank_block = item_in_segment % work.rank_blocks;
    const int projection = item_in_segment / work.rank_blocks % call.projection_count;
    const int slice = item_in_segment / work.rank_blocks / call.projection_count;
    const int wave = wave_of(call, index);
    const CheckedSegment checked = segment_at(call, wave, index);
    const VloraSegment s = checked.segment;
    if (s.length == 0 && checked.fault == 0) {
      item = first_after_wave(item, gridDim.x, call.wave_end[wave] * per_segment);
      continue;
    }
    item += gridDim.x;
    const bool reports_faults =
        threadIdx.x == 0 && rank_block == 0 && slice == 0 && blockIdx.y == 0;
    if (checked.fault != 0 && reports_faults) record_fault(w, checked.fault);
    if (s.length == 0 || s.length > work.up_to) continue;
    const CheckedAdapter checked_adapter = adapter_at(call, projection, index, s.slot, false);
    if (checked_adapter.fault != 0 && reports_faults) record_fault(w, checked_adapter.fault);
    const int rank = int(checked_adapter.adapter.rank);
    const int j = rank_block * kRanksPerBlock + warp * kRanksPerWarp;
    if (j >= rank) continue;  // the same for all lanes of the warp
    const T *const a0 = static_cast<const T *>(checked_adapter.adapter.a) + int64_t(j) * call.d_in;
    const T *const a1 = j + 1 < rank ? a0 + call.d_in : a0;
    const int from = slice * work.slices.depth;
    const int to = int(min64(int64_t(from) + work.slices.depth, call.d_in));
    const bool aligned = aligned_x && aligned16(checked_adapter.adapter.a);
    for (int r = int(blockIdx.y) * R; r < s.length; r += int(gridDim.y) * R) {
      const T *x[R];
#pragma unroll
      for (int i = 0; i < R; ++i)
        x[i] = all_x + (s.start + min64(r + i, s.length - 1)) * call.ldx;
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
          const VloraProjection &out = call.projections[projection];
          static_cast<float *>(out.y)[(s.start + row) * out.ldy + rank_index] =
              sums[i] + static_cast<const float *>(checked_adapter.adapter.b)[rank_index];
        } else {
          const int64_t low = low_offset(call, projection, wave, s.start + row);
          w.partial[slice * w.plane + low + rank_index] = sums[i];
        }
      }
    }
  }
}

// Computes y[row, c] += sign * low[row] · B[c] for the rows of one wave. A warp takes 32
// neighbouring columns. Groups of `lanes` of its lanes compute one column at a time, so that they
// read adjacent 16-byte pieces of B. Each lane multiplies the same piece of all columns, and keeps
// the sum of the column that it writes.
template <typename T, int R>
__global__ void __launch_bounds__(kRowThreads) expand_kernel(VloraCall call, Workspace w,
                                                             RowWork work, int wave) {
  constexpr int kStep = kVector<T>;
  VLORA_SHARED(float, low);  // [R, max_rank]
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int begin = wave_begin(call, wave);
  const int per_segment = work.column_blocks;
  const int64_t items = int64_t(call.wave_end[wave] - begin) * per_segment;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int index = begin + int(item / per_segment);
    const int item_in_segment = int(item % per_segment);
    int projection = 0, first_block = 0;
    // Constant indices keep `work` out of local memory.
#pragma unroll
    for (int p = 1; p < VLORA_MAX_PROJECTIONS; ++p) {
      const int block = work.first_column_block[p];
      const bool reached = p < call.projection_count && block <= item_in_segment;
      projection += reached;
      first_block = reached ? block : first_block;
    }
    const int64_t column =
        int64_t(item_in_segment - first_block) * kColumnsPerBlock + warp * kWarp + lane;
    const CheckedSegment checked = segment_at(call, wave, index);
    const VloraSegment s = checked.segment;
    if (s.length == 0 && checked.fault == 0) return;  // empty segments come last in a wave
    if (s.length == 0 || s.length > work.up_to) continue;
    const CheckedAdapter checked_adapter = adapter_at(call, projection, index, s.slot, false);
    const int rank = int(checked_adapter.adapter.rank);
    if (rank == 0) continue;
    const VloraProjection &out = call.projections[projection];
    const bool aligned = rank % kStep == 0 && aligned16(checked_adapter.adapter.b);
    const int pieces = aligned ? rank / kStep : rank;
    int lanes = 1;
    while (lanes < kWarp && lanes < pieces) lanes *= 2;
    const int member = lane % lanes;
    const int64_t group_column = column - member;  // first column of this group of lanes
    for (int r = int(blockIdx.y) * R; r < s.length; r += int(gridDim.y) * R) {
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
            const T *const b =
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
        T *const y = static_cast<T *>(out.y) + (s.start + r + i) * out.ldy + column;
        *y = from_float<T>(to_float(*y) + results[i]);
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

// Returns a grid with the items along x and the row blocks of a segment along y.
dim3 grid_of(const VloraCall &call, int64_t items, int row_block, int up_to, int resident) {
  // There are more blocks than fit on the device, because their work is not equal.
  constexpr int kBlocksPerResident = 4;
  const int64_t rows = div_up(min64(call.longest, up_to), row_block);
  const int64_t x = min64(items, int64_t(kBlocksPerResident) * resident);
  const int64_t y = min64(rows, div_up(int64_t(kBlocksPerResident) * resident, x));
  return dim3(unsigned(x), unsigned(y));
}

}  // namespace

cudaError_t warm_rows(int *resident) {
  cudaError_t error = cudaSuccess;
  int min_resident = INT32_MAX;
  for (int type : {VLORA_FP16, VLORA_BF16, VLORA_FP32}) {
    for (Shrink kernel : {shrink_of<1>(type), shrink_of<4>(type)}) {
      if (error == cudaSuccess) error = warm(kernel, kRowThreads, 0, resident);
      min_resident = int(min64(min_resident, *resident));
    }
    for (Expand kernel : {expand_of<1>(type), expand_of<4>(type)}) {
      if (error == cudaSuccess) error = warm(kernel, kRowThreads, 0, resident);
      min_resident = int(min64(min_resident, *resident));
    }
  }
  *resident = min_resident;
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
                        work.column_blocks;
  if (items == 0) return cudaSuccess;
  const dim3 grid = grid_of(call, items, row_block, work.up_to, resident);
  return launch(row_block == 1 ? expand_of<1>(call.type) : expand_of<4>(call.type), grid,
                kRowThreads, size_t(rows_shared_bytes(call, row_block)), stream, call, w, work,
                wave);
}

}  // namespace vlora

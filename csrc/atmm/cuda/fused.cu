// The row kernel that computes the shrink and the expand in one launch.
#include "rows.cuh"

namespace vlora {
namespace {

// Returns the number of segments of a wave before its empty ones. All lanes of a warp must call it.
__device__ inline int live_segments(const VloraCall& call, int wave) {
  const int lane = int(threadIdx.x) % kWarp, end = call.wave_end[wave];
  int live = 0;
  for (int first = wave_begin(call, wave); first < end; first += kWarp) {
    const int at = first + lane;
    const int in_warp = count_lanes(at < end && call.segments[at].length != 0);
    live += in_warp;
    if (in_warp < kWarp) break;
  }
  return live;
}

// Computes both products. Blocks take numbered tickets until none is left. The tickets of the
// shrink come first, then those of each wave's expand. The expand of a segment waits until the
// shrink of the segment is complete, and the expand of the second wave until that of the first is
// complete. A ticket waits only for lower ones, which running blocks have taken. So the kernel
// ends, however many blocks run at a time.
template <typename T, int R>
__global__ void __launch_bounds__(kRowThreads, R == 1 ? 3 : 2)
    fused_kernel(VloraCall call, Workspace w, RowWork work, int row_groups) {
  VLORA_SHARED(float, low);
  __shared__ unsigned taken;
  Counters& counters = *w.counters;
  const unsigned shrinks = unsigned(work.slices.count) * unsigned(call.projection_count) *
                           unsigned(work.rank_blocks) * unsigned(row_groups);
  const unsigned expands = unsigned(work.column_blocks) * unsigned(row_groups);
  const unsigned first = unsigned(live_segments(call, 0));
  const unsigned second = call.waves > 1 ? unsigned(live_segments(call, 1)) : 0;
  const unsigned all_shrinks = (first + second) * shrinks, all_first = first * expands;
  const unsigned tickets = all_shrinks + all_first + second * expands;
  for (;;) {
    __syncthreads();  // all threads have read the previous ticket
    if (threadIdx.x == 0) taken = atomicAdd(&counters.ticket, 1u);
    __syncthreads();
    const unsigned ticket = taken;
    if (ticket >= tickets) break;
    const bool shrinking = ticket < all_shrinks;
    const unsigned item = shrinking ? ticket : ticket - all_shrinks;
    const unsigned per_segment = shrinking ? shrinks : expands;
    const unsigned number = item / per_segment, part = item % per_segment;
    const int wave = number >= first;
    const int index = wave ? wave_begin(call, 1) + int(number - first) : int(number);
    const int first_row = int(part % unsigned(row_groups)) * R, row_step = row_groups * R;
    const int in_segment = int(part / unsigned(row_groups));
    const CheckedSegment checked = segment_at(call, wave, index);
    if (shrinking) {
      ShrinkItem shrink_item = shrink_item_at(call, work, index, in_segment);
      shrink_item.first_row = first_row, shrink_item.row_step = row_step;
      shrink<T, R>(call, w, work, shrink_item, wave, checked);
      signal(&counters.shrunk[index]);
      continue;
    }
    wait_for(&counters.shrunk[index], shrinks);
    if (wave) wait_for(&counters.expanded, all_first);
    if (checked.segment.length != 0)
      expand<T, R>(call, w, work, {index, in_segment, first_row, row_step}, wave, checked.segment,
                   low);
    if (second != 0 && wave == 0) signal(&counters.expanded);
  }
  // The last block to leave resets the counters for the next launch.
  __syncthreads();  // all threads have read the last ticket
  if (threadIdx.x == 0) taken = atomicAdd(&counters.left, 1u);
  __syncthreads();
  if (taken + 1 != gridDim.x) return;
  for (int i = int(threadIdx.x); i < capacity_of(call); i += kRowThreads) counters.shrunk[i] = 0;
  if (threadIdx.x == 0) counters.ticket = counters.left = counters.expanded = 0;
}

using Fused = void (*)(VloraCall, Workspace, RowWork, int);

template <int R>
Fused fused_of(int type) {
  if (type == VLORA_FP32) return fused_kernel<float, R>;
  return type == VLORA_FP16 ? fused_kernel<Half, R> : fused_kernel<Bfloat, R>;
}

}  // namespace

cudaError_t warm_fused(int* resident) {
  cudaError_t error = cudaSuccess;
  int min_resident = INT32_MAX;
  for (int type : {VLORA_FP16, VLORA_BF16, VLORA_FP32}) {
    for (Fused kernel : {fused_of<1>(type), fused_of<4>(type)}) {
      if (error == cudaSuccess) error = warm(kernel, kRowThreads, 0, resident);
      min_resident = int(min64(min_resident, *resident));
    }
  }
  *resident = min_resident;
  return error;
}

bool can_fuse(const VloraCall& call) {
  return !call.heads && call.waves <= kFusedWaves && capacity_of(call) <= VLORA_FUSED_SEGMENTS;
}

cudaError_t fused_rows(const VloraCall& call, const Workspace& w, const RowWork& work,
                       int row_block, int resident, cudaStream_t stream) {
  const int64_t shrinks =
      int64_t(capacity_of(call)) * work.slices.count * call.projection_count * work.rank_blocks;
  const int64_t expands = int64_t(capacity_of(call)) * work.column_blocks;
  const int64_t items = shrinks > expands ? shrinks : expands;
  const int64_t rows = div_up(min64(call.longest, work.up_to), row_block);
  const int row_groups = int(min64(rows, div_up(resident, items)));
  const dim3 grid(unsigned(min64(items * row_groups, resident)));
  return launch(row_block == 1 ? fused_of<1>(call.type) : fused_of<4>(call.type), grid, kRowThreads,
                size_t(rows_shared_bytes(call, row_block)), stream, call, w, work, row_groups);
}

}  // namespace vlora

// The row kernels of the shrink and the expand, launched one after another. fused.cu has a kernel
// that computes both. These serve calls in which tiles compute other segments, and those for which
// fused_kernel has no counters.
#include "rows.cuh"

namespace vlora {
namespace {

template <typename T, int R>
__global__ void __launch_bounds__(kRowThreads, R == 1 ? 3 : 2)
    shrink_kernel(VloraCall call, Workspace w, RowWork work) {
  const int64_t per_segment = int64_t(work.slices.count) * call.projection_count * work.rank_blocks;
  const int64_t items = capacity_of(call) * per_segment;
  for (int64_t i = blockIdx.x; i < items;) {
    const int index = int(i / per_segment);
    const int wave = wave_of(call, index);
    const CheckedSegment checked = segment_at(call, wave, index);
    if (checked.segment.length == 0 && checked.fault == 0) {
      i = first_after_wave(i, gridDim.x, call.wave_end[wave] * per_segment);
      continue;
    }
    ShrinkItem item = shrink_item_at(call, work, index, int(i % per_segment));
    item.first_row = int(blockIdx.y) * R, item.row_step = int(gridDim.y) * R;
    shrink<T, R>(call, w, work, item, wave, checked);
    i += gridDim.x;
  }
}

template <typename T, int R>
__global__ void __launch_bounds__(kRowThreads, R == 1 ? 3 : 2)
    expand_kernel(VloraCall call, Workspace w, RowWork work, int wave) {
  VLORA_SHARED(float, low);
  const int begin = wave_begin(call, wave), per_segment = work.column_blocks;
  const int64_t items = int64_t(call.wave_end[wave] - begin) * per_segment;
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const ExpandItem item = {begin + int(i / per_segment), int(i % per_segment),
                             int(blockIdx.y) * R, int(gridDim.y) * R};
    const CheckedSegment checked = segment_at(call, wave, item.index);
    const VloraSegment s = checked.segment;
    if (s.length == 0 && checked.fault == 0) return;  // empty segments come last in a wave
    if (s.length == 0 || s.length > work.up_to) continue;
    expand<T, R>(call, w, work, item, wave, s, low);
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
dim3 grid_of(const VloraCall& call, int64_t items, int row_block, int up_to, int resident) {
  // There are more blocks than fit on the device, because their work is not equal.
  constexpr int kBlocksPerResident = 4;
  const int64_t rows = div_up(min64(call.longest, up_to), row_block);
  const int64_t x = min64(items, int64_t(kBlocksPerResident) * resident);
  const int64_t y = min64(rows, div_up(int64_t(kBlocksPerResident) * resident, x));
  return dim3(unsigned(x), unsigned(y));
}

}  // namespace

cudaError_t warm_rows(int* resident) {
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

int rows_shared_bytes(const VloraCall& call, int row_block) {
  return row_block * call.max_rank * int(sizeof(float));
}

cudaError_t shrink_rows(const VloraCall& call, const Workspace& w, const RowWork& work,
                        int row_block, int resident, cudaStream_t stream) {
  const int64_t items =
      int64_t(capacity_of(call)) * work.slices.count * call.projection_count * work.rank_blocks;
  const dim3 grid = grid_of(call, items, row_block, work.up_to, resident);
  return launch(row_block == 1 ? shrink_of<1>(call.type) : shrink_of<4>(call.type), grid,
                kRowThreads, 0, stream, call, w, work);
}

cudaError_t expand_rows(const VloraCall& call, const Workspace& w, const RowWork& work,
                        int row_block, int wave, int resident, cudaStream_t stream) {
  const int64_t items = int64_t(call.wave_end[wave] - wave_begin(call, wave)) * work.column_blocks;
  if (items == 0) return cudaSuccess;
  const dim3 grid = grid_of(call, items, row_block, work.up_to, resident);
  return launch(row_block == 1 ? expand_of<1>(call.type) : expand_of<4>(call.type), grid,
                kRowThreads, size_t(rows_shared_bytes(call, row_block)), stream, call, w, work,
                wave);
}

}  // namespace vlora

// Fills the problem arrays of the grouped products, and sums the depth slices of the shrink.
#include "kernels.cuh"

namespace vlora {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kSumThreads = 256;
constexpr int kSumVector = 4;  // elements that a thread sums together; ranks are padded to 8

// Runs as one block. Each thread takes one problem at a time, and a scan counts the tiles before
// each problem. The lower half of a 64-bit number counts shrink tiles, the upper half expand tiles.
__global__ void __launch_bounds__(kPlanThreads, 1)
    plan_kernel(VloraCall call, Workspace w, int rows_up_to) {
  __shared__ uint64_t scan[2][kPlanThreads];
  const int thread = int(threadIdx.x);
  uint64_t before = 0;
  for (int base = 0; base < w.shrink.count; base += kPlanThreads) {
    const int i = base + thread;
    uint64_t tiles = 0;
    if (i < w.shrink.count) {
      const ProblemPair pair = problems_at(call, w, i, rows_up_to);
      if (pair.fault != 0) record_fault(w, pair.fault);
      w.shrink.problems[i] = pair.shrink;
      w.expand.problems[i] = pair.expand;
      tiles = uint64_t(tiles_of(pair.shrink, w.shrink.block_rows, w.shrink.block_columns,
                                w.shrink.slices.count)) |
              uint64_t(tiles_of(pair.expand, w.expand.block_rows, w.expand.block_columns, 1)) << 32;
    }
    int current = 0;
    scan[current][thread] = tiles;
    __syncthreads();
    for (int step = 1; step < kPlanThreads; step *= 2) {
      uint64_t sum = scan[current][thread];
      if (thread >= step) sum += scan[current][thread - step];
      current = 1 - current;
      scan[current][thread] = sum;
      __syncthreads();
    }
    const uint64_t first = before + scan[current][thread] - tiles;
    if (i < w.shrink.count) {
      w.shrink.first[i] = int32_t(first & 0xffffffffu);
      w.expand.first[i] = int32_t(first >> 32);
    }
    before += scan[current][kPlanThreads - 1];
    __syncthreads();  // the next iteration overwrites the scan
  }
  if (thread == 0) {
    w.shrink.first[w.shrink.count] = int32_t(before & 0xffffffffu);
    w.expand.first[w.expand.count] = int32_t(before >> 32);
  }
}

// Sums the slices of every element of the intermediate, in their order. Rows that belong to no
// segment keep earlier contents of the workspace, and no kernel reads them.
template <typename T>
__global__ void __launch_bounds__(kSumThreads) reduce_kernel(Workspace w) {
  const int64_t step = int64_t(gridDim.x) * kSumThreads * kSumVector;
  for (int64_t i = (int64_t(blockIdx.x) * kSumThreads + threadIdx.x) * kSumVector; i < w.plane;
       i += step) {
    float sum[kSumVector] = {};
    for (int slice = 0; slice < w.shrink.slices.count; ++slice) {
      float part[kSumVector];
      load16(w.partial + slice * w.plane + i, part);
      for (int k = 0; k < kSumVector; ++k) sum[k] += part[k];
    }
    for (int k = 0; k < kSumVector; ++k) static_cast<T*>(w.low)[i + k] = from_float<T>(sum[k]);
  }
}

}  // namespace

cudaError_t warm_plan(int* resident) {
  cudaError_t error = warm(plan_kernel, kPlanThreads, 0, resident);
  if (error == cudaSuccess) error = warm(reduce_kernel<Half>, kSumThreads, 0, resident);
  if (error == cudaSuccess) error = warm(reduce_kernel<Bfloat>, kSumThreads, 0, resident);
  return error;
}

cudaError_t plan(const VloraCall& call, const Workspace& w, int rows_up_to, cudaStream_t stream) {
  return launch(plan_kernel, dim3(1), kPlanThreads, 0, stream, call, w, rows_up_to);
}

cudaError_t reduce(const VloraCall& call, const Workspace& w, int resident, cudaStream_t stream) {
  const int64_t blocks = div_up(w.plane, kSumThreads * kSumVector);
  const dim3 grid(unsigned(min64(blocks, resident)));
  return call.type == VLORA_FP16 ? launch(reduce_kernel<Half>, grid, kSumThreads, 0, stream, w)
                                 : launch(reduce_kernel<Bfloat>, grid, kSumThreads, 0, stream, w);
}

}  // namespace vlora

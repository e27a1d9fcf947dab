// Fills the problem arrays; sums the depth slices of the shrink.
#include "numbers.cuh"
#include "problems.cuh"

namespace vlora {
namespace {

constexpr int kThreads = 256;
constexpr int kSliceStep = 64;   // slices end on whole tiles of the deepest block
constexpr int kRowBlocks = 8;    // blocks that share one segment's rows when reducing

__device__ void set(const Problems &p, int i, int m, int n, int k, const void *a, Stride lda,
                    const void *b, Stride ldb, void *c, Stride ldc) {
  const bool empty = m <= 0 || n <= 0 || k <= 0;
  p.sizes[i] = cutlass::gemm::GemmCoord(empty ? 0 : m, empty ? 0 : n, empty ? 0 : k);
  p.a[i] = const_cast<void *>(a);
  p.b[i] = const_cast<void *>(b);
  p.c[i] = c;
  p.lda[i] = lda;
  p.ldb[i] = ldb;
  p.ldc[i] = ldc;
}

__global__ void plan_kernel(VloraCall call, Workspace w, int slices) {
  constexpr int kBytes = 2;  // fp16 and bf16 alike
  const int pairs = call.capacity * call.projection_count;
  const int depth = ((call.d_in + slices - 1) / slices + kSliceStep - 1) / kSliceStep * kSliceStep;
  const int64_t plane = int64_t(call.rows) * call.max_rank;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pairs; i += gridDim.x * blockDim.x) {
    const int projection = i / call.capacity;
    const VloraSegment s = checked(call, i % call.capacity);
    VloraAdapter adapter{nullptr, nullptr, 0};
    if (s.length > 0) adapter = adapter_of(call, projection, s.slot);
    const int rank = int(adapter.rank);
    const int64_t offset = projection * plane + int64_t(s.start) * call.max_rank;
    for (int slice = 0; slice < slices; ++slice) {
      const int64_t from = int64_t(slice) * depth;
      set(w.shrink, slice * pairs + i, s.length, rank, int(min(int64_t(depth), call.d_in - from)),
          static_cast<const char *>(call.x) + (s.start * call.ldx + from) * kBytes, call.ldx,
          static_cast<const char *>(adapter.a) + from * kBytes, call.d_in,
          w.partial + int64_t(slice) * call.projection_count * plane + offset, call.max_rank);
    }
    const VloraProjection &out = call.projections[projection];
    set(w.expand, i, s.length, int(out.d_out), rank,
        static_cast<char *>(w.low) + offset * kBytes, call.max_rank, adapter.b, rank,
        static_cast<char *>(out.y) + s.start * out.ldy * kBytes, out.ldy);
  }
}

// The sign is applied here, so that the expand's epilogue is y + 1 * accumulator for all problems.
template <typename T>
__global__ void reduce_kernel(VloraCall call, Workspace w, int slices) {
  const int projection = blockIdx.y;
  const VloraSegment s = checked(call, blockIdx.x);
  if (s.length == 0) return;
  const int rank = int(adapter_of(call, projection, s.slot).rank);
  const int depth = ((call.d_in + slices - 1) / slices + kSliceStep - 1) / kSliceStep * kSliceStep;
  const int used = min(slices, (call.d_in + depth - 1) / depth);
  const int64_t plane = int64_t(call.rows) * call.max_rank;
  const int64_t stride = plane * call.projection_count;
  const VloraProjection &out = call.projections[projection];
  for (int r = blockIdx.z; r < s.length; r += gridDim.z) {
    const int64_t row = projection * plane + int64_t(s.start + r) * call.max_rank;
    for (int j = threadIdx.x; j < rank; j += blockDim.x) {
      float sum = 0;
      for (int slice = 0; slice < used; ++slice) sum += w.partial[slice * stride + row + j];
      sum *= float(s.sign);
      if (call.shrink_only) {
        static_cast<float *>(out.y)[int64_t(s.start + r) * out.ldy + j] += sum;
      } else {
        static_cast<T *>(w.low)[row + j] = narrowed<T>(sum);
      }
    }
  }
}

}  // namespace

cudaError_t plan(const VloraCall &call, const Workspace &w, int slices, cudaStream_t stream) {
  const int pairs = call.capacity * call.projection_count;
  plan_kernel<<<(pairs + kThreads - 1) / kThreads, kThreads, 0, stream>>>(call, w, slices);
  return cudaGetLastError();
}

cudaError_t reduce(const VloraCall &call, const Workspace &w, int slices, cudaStream_t stream) {
  const dim3 grid(call.capacity, call.projection_count, kRowBlocks);
  if (call.type == VLORA_FP16) {
    reduce_kernel<__half><<<grid, 64, 0, stream>>>(call, w, slices);
  } else {
    reduce_kernel<__nv_bfloat16><<<grid, 64, 0, stream>>>(call, w, slices);
  }
  return cudaGetLastError();
}

}  // namespace vlora

// out = base + sign * B A for all matrices of a switch, in one launch, with fp32 products and sums
// and one rounding. A block computes 128 x 128 elements and a thread 8 x 8 of them, as 4 x 4
// elements in each quarter of the block, so that neighbouring lanes always access neighbouring
// addresses.
#include "kernels.cuh"

namespace vlora {
namespace {

constexpr int kSide = 128, kDepth = 16, kThreads = 256, kHalf = kSide / 2, kQuad = 4;

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(VloraMergeCall call) {
  __shared__ float a[kDepth][kSide], b[kDepth][kSide];
  const int tx = int(threadIdx.x) % (kHalf / kQuad), ty = int(threadIdx.x) / (kHalf / kQuad);
  for (int64_t block = blockIdx.x; block < call.blocks; block += gridDim.x) {
    int begin = 0, end = call.count;
    while (end - begin > 1) {
      const int middle = begin + (end - begin) / 2;
      (call.merges[middle].first <= block ? begin : end) = middle;
    }
    const VloraMerge m = call.merges[begin];
    const int64_t columns = div_up(m.d_in, kSide);
    const int64_t row = (block - m.first) / columns * kSide;
    const int64_t column = (block - m.first) % columns * kSide;
    float sums[8][8] = {};
    for (int64_t from = 0; from < m.rank; from += kDepth) {
      __syncthreads();  // all threads have read the previous iteration's parts
      for (int i = int(threadIdx.x); i < kDepth * kSide; i += kThreads) {
        const int64_t k = from + i / kSide, c = column + i % kSide;
        a[i / kSide][i % kSide] = k < m.rank && c < m.d_in ? m.a[k * m.d_in + c] : 0.f;
        const int64_t l = from + i % kDepth, r = row + i / kDepth;
        b[i % kDepth][i / kDepth] = l < m.rank && r < m.d_out ? m.b[r * m.rank + l] : 0.f;
      }
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < kDepth; ++k) {
        float p[8], q[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          p[i] = b[k][i / kQuad * kHalf + ty * kQuad + i % kQuad];
          q[i] = a[k][i / kQuad * kHalf + tx * kQuad + i % kQuad];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[i][j] += p[i] * q[j];
      }
    }
    const T *const base = static_cast<const T *>(call.base) + m.offset;
    T *const out = static_cast<T *>(call.out) + m.offset;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t r = row + i / kQuad * kHalf + ty * kQuad + i % kQuad;
      if (r >= m.d_out) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int64_t c = column + j / kQuad * kHalf + tx * kQuad + j % kQuad;
        if (c < m.d_in)
          out[r * m.d_in + c] =
              from_float<T>(to_float(base[r * m.d_in + c]) + float(call.sign) * sums[i][j]);
      }
    }
  }
}

}  // namespace

int64_t merge_blocks(const VloraMerge &m) { return div_up(m.d_out, kSide) * div_up(m.d_in, kSide); }

cudaError_t warm_merge(int *resident) {
  cudaError_t error = cudaSuccess;
  for (auto kernel : {merge_kernel<Half>, merge_kernel<Bfloat>, merge_kernel<float>})
    if (error == cudaSuccess) error = warm(kernel, kThreads, 0, resident);
  return error;
}

cudaError_t merge(const VloraMergeCall &call, int resident, cudaStream_t stream) {
  const dim3 grid(unsigned(min64(call.blocks, resident)));
  if (call.type == VLORA_FP32) return launch(merge_kernel<float>, grid, kThreads, 0, stream, call);
  return call.type == VLORA_FP16 ? launch(merge_kernel<Half>, grid, kThreads, 0, stream, call)
                                 : launch(merge_kernel<Bfloat>, grid, kThreads, 0, stream, call);
}

}  // namespace vlora

// out = base + sign * B A for all matrices of a switch, in one launch, with fp32 products and sums
// and one rounding. A block computes 128 x 128 elements. A thread computes 8 x 8 of them, as 4 x 4
// elements in each quarter of the block, so that neighbouring lanes access neighbouring addresses.
#include "kernels.cuh"

namespace vlora {
namespace {

constexpr int kSide = 128, kDepth = 16, kThreads = 256, kHalf = kSide / 2, kQuad = 4;

// The transposed part of B in shared memory is [kDepth][kStride]. A warp stores 8 steps of depth of
// 4 rows, which it reads as 4 pieces of 32 bytes. With this stride the stores use 32 different
// banks, and rows stay aligned to 16 bytes.
constexpr int kStride = kSide + 4, kSteps = 8;
// Returns the step of depth, and the row of B, of the i-th element that a block stores.
VLORA_HD constexpr int step_of(int i) { return i / (kSteps * kSide) * kSteps + i % kSteps; }
VLORA_HD constexpr int row_of(int i) { return i / kSteps % kSide; }

// Returns the largest number of lanes of a warp that store to the same bank at once.
constexpr int bank_conflicts() {
  constexpr int kBanks = 32;
  int largest = 0;
  for (int first = 0; first < kDepth * kSide; first += kWarp) {
    int lanes[kBanks] = {};
    for (int i = first; i < first + kWarp; ++i) {
      const int on_bank = ++lanes[(step_of(i) * kStride + row_of(i)) % kBanks];
      if (on_bank > largest) largest = on_bank;
    }
  }
  return largest;
}
static_assert(bank_conflicts() == 1, "each lane must store to a bank of its own");

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(VloraMergeCall call) {
  __shared__ float a[kDepth][kSide], b[kDepth][kStride];
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
#pragma unroll 4
      for (int i = int(threadIdx.x); i < kDepth * kSide; i += kThreads) {
        const int64_t k = from + i / kSide, c = column + i % kSide;
        a[i / kSide][i % kSide] = k < m.rank && c < m.d_in ? m.a[k * m.d_in + c] : 0.f;
        const int64_t l = from + step_of(i), r = row + row_of(i);
        b[step_of(i)][row_of(i)] = l < m.rank && r < m.d_out ? m.b[r * m.rank + l] : 0.f;
      }
      __syncthreads();
#pragma unroll 2
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
    const T* const base = static_cast<const T*>(call.base) + m.offset;
    T* const out = static_cast<T*>(call.out) + m.offset;
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

int64_t merge_blocks(const VloraMerge& m) { return div_up(m.d_out, kSide) * div_up(m.d_in, kSide); }

cudaError_t warm_merge(int* resident) {
  cudaError_t error = cudaSuccess;
  for (auto kernel : {merge_kernel<Half>, merge_kernel<Bfloat>, merge_kernel<float>})
    if (error == cudaSuccess) error = warm(kernel, kThreads, 0, resident);
  return error;
}

cudaError_t merge(const VloraMergeCall& call, int resident, cudaStream_t stream) {
  const dim3 grid(unsigned(min64(call.blocks, resident)));
  if (call.type == VLORA_FP32) return launch(merge_kernel<float>, grid, kThreads, 0, stream, call);
  return call.type == VLORA_FP16 ? launch(merge_kernel<Half>, grid, kThreads, 0, stream, call)
                                 : launch(merge_kernel<Bfloat>, grid, kThreads, 0, stream, call);
}

}  // namespace vlora

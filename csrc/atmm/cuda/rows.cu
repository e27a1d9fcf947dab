// The decode path: one row a segment. No tensor cores, since a tile of 16 rows would be 15/16
// padding: this is a matter of bandwidth, and both kernels read each adapter byte once per row,
// in 16-byte loads that neighbouring lanes coalesce. Longer segments stay correct (rows in turn),
// and so do unaligned ones (element by element).
#include "numbers.cuh"
#include "problems.cuh"

namespace vlora {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kVector = 8;  // elements of 16 bytes
constexpr int kColumnsPerBlock = 256;

__host__ __device__ bool aligned16(const void *p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

template <typename T>
__device__ float dot8(const T *a, const T *b) {
  const uint4 va = __ldg(reinterpret_cast<const uint4 *>(a));
  const uint4 vb = __ldg(reinterpret_cast<const uint4 *>(b));
  const T *ea = reinterpret_cast<const T *>(&va);
  const T *eb = reinterpret_cast<const T *>(&vb);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum += widened(ea[i]) * widened(eb[i]);
  return sum;
}

__device__ float summed(float v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// low[row, j] = sign * dot(x[row], A[j]); one warp a rank. Grid: (segment, rank block, projection).
template <typename T>
__global__ void shrink_rows(VloraCall call, Workspace w, bool aligned_x) {
  const int lane = threadIdx.x % 32;
  const int j = blockIdx.y * kWarps + threadIdx.x / 32;
  const int projection = blockIdx.z;
  const VloraSegment s = checked(call, blockIdx.x);
  if (s.length == 0) return;
  const VloraAdapter adapter = adapter_of(call, projection, s.slot);
  if (j >= adapter.rank) return;
  const T *a = static_cast<const T *>(adapter.a) + int64_t(j) * call.d_in;
  const bool aligned = aligned_x && aligned16(adapter.a);
  const VloraProjection &out = call.projections[projection];
  for (int r = 0; r < s.length; ++r) {
    const int64_t row = s.start + r;
    const T *x = static_cast<const T *>(call.x) + row * call.ldx;
    float sum = 0;
    if (aligned) {
#pragma unroll 4
      for (int k = lane * kVector; k < call.d_in; k += 32 * kVector) sum += dot8(x + k, a + k);
    } else {
      for (int k = lane; k < call.d_in; k += 32) sum += widened(x[k]) * widened(a[k]);
    }
    sum = summed(sum, 32) * float(s.sign);
    if (lane != 0) continue;
    if (call.shrink_only) {
      static_cast<float *>(out.y)[row * out.ldy + j] += sum;
    } else {
      w.partial[(int64_t(projection) * call.rows + row) * call.max_rank + j] = sum;
    }
  }
}

// y[row, c] += dot(low[row], B[c]); `lanes` neighbouring lanes share a column, so that a warp reads
// consecutive 16-byte pieces of B. Grid: (segment, column block, projection).
template <typename T>
__global__ void expand_rows(VloraCall call, Workspace w) {
  const int projection = blockIdx.z;
  const VloraSegment s = checked(call, blockIdx.x);
  if (s.length == 0) return;
  const VloraAdapter adapter = adapter_of(call, projection, s.slot);
  const int rank = int(adapter.rank);
  if (rank == 0) return;
  const VloraProjection &out = call.projections[projection];
  const bool aligned = rank % kVector == 0 && aligned16(adapter.b);
  const int pieces = aligned ? (rank + kVector - 1) / kVector : rank;
  int lanes = 1;
  while (lanes < 32 && lanes < pieces) lanes *= 2;
  const int member = threadIdx.x % lanes;
  const int group = threadIdx.x / lanes, groups = kThreads / lanes;
  const int64_t first = int64_t(blockIdx.y) * kColumnsPerBlock;
  for (int r = 0; r < s.length; ++r) {
    const int64_t row = s.start + r;
    const float *low = w.partial + (int64_t(projection) * call.rows + row) * call.max_rank;
    for (int i = group; i < kColumnsPerBlock; i += groups) {
      const int64_t column = first + i;
      const bool inside = column < out.d_out;
      float sum = 0;
      if (inside) {
        const T *b = static_cast<const T *>(adapter.b) + column * rank;
        for (int piece = member; piece < pieces; piece += lanes) {
          if (aligned) {
            const uint4 v = __ldg(reinterpret_cast<const uint4 *>(b + piece * kVector));
            const T *e = reinterpret_cast<const T *>(&v);
#pragma unroll
            for (int k = 0; k < kVector; ++k) sum += widened(e[k]) * low[piece * kVector + k];
          } else {
            sum += widened(b[piece]) * low[piece];
          }
        }
      }
      sum = summed(sum, lanes);
      if (inside && member == 0) {
        T *y = static_cast<T *>(out.y) + row * out.ldy + column;
        *y = narrowed<T>(widened(*y) + sum);
      }
    }
  }
}

template <typename T>
cudaError_t launch(const VloraCall &call, const Workspace &w, cudaStream_t stream) {
  const bool x = aligned16(call.x) && call.ldx % kVector == 0 && call.d_in % kVector == 0;
  const dim3 shrink(call.capacity, (call.max_rank + kWarps - 1) / kWarps, call.projection_count);
  shrink_rows<T><<<shrink, kThreads, 0, stream>>>(call, w, x);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || call.shrink_only) return error;
  int64_t widest = 0;
  for (int p = 0; p < call.projection_count; ++p) {
    widest = call.projections[p].d_out > widest ? call.projections[p].d_out : widest;
  }
  const dim3 expand(call.capacity, unsigned((widest + kColumnsPerBlock - 1) / kColumnsPerBlock),
                    call.projection_count);
  expand_rows<T><<<expand, kThreads, 0, stream>>>(call, w);
  return cudaGetLastError();
}

}  // namespace

cudaError_t apply_rows(const VloraCall &call, const Workspace &w, cudaStream_t stream) {
  return call.type == VLORA_FP16 ? launch<__half>(call, w, stream)
                                 : launch<__nv_bfloat16>(call, w, stream);
}

}  // namespace vlora

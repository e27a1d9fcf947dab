// From segments to the device-side problem arrays of the grouped GEMMs, without the host.
#pragma once

#include <cutlass/gemm_coord.h>
#include <cutlass/layout/matrix.h>

#include "atmm_cuda.h"

namespace vlora {

using Stride = cutlass::layout::RowMajor::Stride::LongIndex;

// One grouped GEMM's arrays, all on the device, all of `count` entries.
struct Problems {
  cutlass::gemm::GemmCoord *sizes;
  void **a, **b, **c;
  Stride *lda, *ldb, *ldc;
  int count;
};

// Where the workspace's parts lie. Everything is aligned to 16 bytes.
struct Workspace {
  Problems shrink, expand;
  float *partial;  // [slices, projections, rows, max_rank]: unreduced shrink
  void *low;       // [projections, rows, max_rank] in the call's type, times the sign
  int64_t bytes;
};

inline int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

inline Workspace lay_out(const VloraCall &call, int slices) {
  char *at = static_cast<char *>(call.workspace);
  const char *begin = at;
  auto take = [&at](int64_t bytes) {
    char *part = at;
    at += padded(bytes);
    return static_cast<void *>(part);
  };
  auto problems = [&](int count) {
    Problems p;
    p.count = count;
    p.sizes = static_cast<cutlass::gemm::GemmCoord *>(
        take(sizeof(cutlass::gemm::GemmCoord) * int64_t(count)));
    p.a = static_cast<void **>(take(sizeof(void *) * int64_t(count)));
    p.b = static_cast<void **>(take(sizeof(void *) * int64_t(count)));
    p.c = static_cast<void **>(take(sizeof(void *) * int64_t(count)));
    p.lda = static_cast<Stride *>(take(sizeof(Stride) * int64_t(count)));
    p.ldb = static_cast<Stride *>(take(sizeof(Stride) * int64_t(count)));
    p.ldc = static_cast<Stride *>(take(sizeof(Stride) * int64_t(count)));
    return p;
  };
  const int pairs = call.capacity * call.projection_count;
  const int64_t low = int64_t(call.projection_count) * call.rows * call.max_rank;
  Workspace w;
  w.shrink = problems(pairs * slices);
  w.expand = problems(pairs);
  w.partial = static_cast<float *>(take(low * slices * int64_t(sizeof(float))));
  w.low = take(low * 2);
  w.bytes = at - begin;
  return w;
}

// The segment if the device may touch its rows, else an empty one.
__device__ inline VloraSegment checked(const VloraCall &call, int index) {
  VloraSegment s = call.segments[index];
  const bool valid = s.slot >= 0 && s.slot < call.slots && s.start >= 0 && s.length >= 0 &&
                     int64_t(s.start) + s.length <= call.rows;
  if (!valid) s.length = 0;
  return s;
}

// The adapter of a valid segment; rank 0 where the projection is not targeted.
__device__ inline VloraAdapter adapter_of(const VloraCall &call, int projection, int slot) {
  VloraAdapter adapter = call.projections[projection].adapters[slot];
  if (adapter.a == nullptr || adapter.rank > call.max_rank) adapter.rank = 0;
  return adapter;
}

cudaError_t plan(const VloraCall &call, const Workspace &w, int slices, cudaStream_t stream);
cudaError_t reduce(const VloraCall &call, const Workspace &w, int slices, cudaStream_t stream);
cudaError_t apply_rows(const VloraCall &call, const Workspace &w, cudaStream_t stream);

}  // namespace vlora

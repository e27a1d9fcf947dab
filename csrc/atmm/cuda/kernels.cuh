// The launches behind the C interface, and the table of tile instances.
#pragma once

#include "problems.cuh"

namespace vlora {

// Records a fault unless the workspace holds an earlier one that the caller has not read.
__device__ inline void record_fault(const Workspace& w, uint64_t fault) {
  atomicCAS(w.fault, 0, fault);
}

// A compiled tile configuration of the grouped product (grouped.cuh, or host/tiles.cu for the
// emulation).
struct Instance {
  VloraTile tile;
  cudaError_t (*warm)(int* resident);
  // Computes problems begin ... end-1 of the group with `blocks` blocks.
  cudaError_t (*launch)(const Group&, int begin, int end, int blocks, cudaStream_t);
};

// build.py generates their definitions together with the instances.
extern const Instance* const kInstances;
extern const int kInstanceCount;

// warm_... loads kernels, and sets `resident` to the number of blocks that fit on the device.
cudaError_t warm_plan(int* resident);
cudaError_t plan(const VloraCall&, const Workspace&, int rows_up_to, cudaStream_t);
cudaError_t reduce(const VloraCall&, const Workspace&, int resident, cudaStream_t);

cudaError_t warm_rows(int* resident);
cudaError_t shrink_rows(const VloraCall&, const Workspace&, const RowWork&, int row_block,
                        int resident, cudaStream_t);
cudaError_t expand_rows(const VloraCall&, const Workspace&, const RowWork&, int row_block, int wave,
                        int resident, cudaStream_t);
// Both products in one launch, for calls without tiles for which can_fuse returns true.
cudaError_t warm_fused(int* resident);
cudaError_t fused_rows(const VloraCall&, const Workspace&, const RowWork&, int row_block,
                       int resident, cudaStream_t);
bool can_fuse(const VloraCall&);
int rows_shared_bytes(const VloraCall&, int row_block);

cudaError_t warm_merge(int* resident);
cudaError_t merge(const VloraMergeCall&, int resident, cudaStream_t);
int64_t merge_blocks(const VloraMerge&);

}  // namespace vlora

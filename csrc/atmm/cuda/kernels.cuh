// The launches behind the interface, and the table of tile instances.
#pragma once

#include "problems.cuh"

namespace vlora {

// The first fault of a workspace stays until the caller has read it.
__device__ inline void note(const Workspace &w, uint64_t fault) { atomicCAS(w.fault, 0, fault); }

// A tile configuration of the grouped product, compiled (grouped.cuh; on the host, host/tiles.cu).
struct Instance {
  VloraTile tile;
  cudaError_t (*warm)(int *resident);
  // Problems begin ... end-1 of the group by `blocks` blocks.
  cudaError_t (*launch)(const Group &, int begin, int end, int blocks, cudaStream_t);
};

// Listed beside the instances (tools/tile_search/cuda_build.py).
extern const Instance *const kInstances;
extern const int kInstanceCount;

// warm_...: load the kernels; the blocks of one launch that the device can hold.
cudaError_t warm_plan(int *resident);
cudaError_t plan(const VloraCall &, const Workspace &, int rows_up_to, cudaStream_t);
cudaError_t reduce(const VloraCall &, const Workspace &, int resident, cudaStream_t);

cudaError_t warm_rows(int *resident);
cudaError_t shrink_rows(const VloraCall &, const Workspace &, const RowWork &, int row_block,
                        int resident, cudaStream_t);
cudaError_t expand_rows(const VloraCall &, const Workspace &, const RowWork &, int row_block,
                        int wave, int resident, cudaStream_t);
int rows_shared_bytes(const VloraCall &, int row_block);

cudaError_t warm_merge(int *resident);
cudaError_t merge(const VloraMergeCall &, int resident, cudaStream_t);
int64_t merge_blocks(const VloraMerge &);

}  // namespace vlora

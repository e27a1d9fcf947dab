// The C interface: checks what the host can see, then launches.
#include <string>

#include "grouped.cuh"

namespace vlora {

// Generated beside the instances (tools/tile_search/cuda_build.py).
extern const Instance *const kInstances;
extern const int kInstanceCount;

namespace {

thread_local std::string last_error;

int32_t refused(int32_t code, const std::string &why) {
  last_error = why;
  return code;
}

int32_t done(cudaError_t error) {
  if (error == cudaSuccess) return VLORA_OK;
  return refused(VLORA_CUDA_ERROR, cudaGetErrorString(error));
}

bool aligned16(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

int32_t check(const VloraCall &call) {
  if (call.rows < 0 || call.d_in <= 0 || call.capacity < 0 || call.slots < 0) {
    return refused(VLORA_BAD_ARGUMENT, "a negative size");
  }
  if (call.max_rank <= 0) return refused(VLORA_BAD_ARGUMENT, "max_rank must be positive");
  if (call.projection_count < 1 || call.projection_count > VLORA_MAX_PROJECTIONS) {
    return refused(VLORA_BAD_ARGUMENT, "projection_count " + std::to_string(call.projection_count) +
                                           " is not in 1 ... 4");
  }
  if (call.type != VLORA_FP16 && call.type != VLORA_BF16) {
    return refused(VLORA_BAD_ARGUMENT, "type " + std::to_string(call.type) + " is unknown");
  }
  if (call.x == nullptr || call.segments == nullptr) {
    return refused(VLORA_BAD_ARGUMENT, "x or segments is null");
  }
  for (int p = 0; p < call.projection_count; ++p) {
    if (call.projections[p].adapters == nullptr || call.projections[p].y == nullptr) {
      return refused(VLORA_BAD_ARGUMENT, "projection " + std::to_string(p) + " has a null pointer");
    }
  }
  return VLORA_OK;
}

// What 16-byte loads and stores need; ranks are padded to 8 by the loader.
const char *misaligned(const VloraCall &call) {
  if (!aligned16(call.x) || call.ldx % 8 || call.d_in % 8) return "x, ldx or d_in";
  if (call.max_rank % 8) return "max_rank";
  if (call.shrink_only) return nullptr;
  for (int p = 0; p < call.projection_count; ++p) {
    const VloraProjection &out = call.projections[p];
    if (!aligned16(out.y) || out.ldy % 8 || out.d_out % 8) return "y, ldy or d_out";
  }
  return nullptr;
}

const Instance *find(int index, int type, bool expand) {
  if (index < 0 || index >= kInstanceCount) return nullptr;
  const Instance *instance = kInstances + index;
  return instance->tile.type == type && bool(instance->tile.expand) == expand ? instance : nullptr;
}

}  // namespace
}  // namespace vlora

extern "C" {

int32_t vlora_cuda_version(void) { return 1; }

int32_t vlora_cuda_tiles(void) { return vlora::kInstanceCount; }

int32_t vlora_cuda_tile(int32_t index, VloraTile *tile) {
  if (index < 0 || index >= vlora::kInstanceCount || tile == nullptr) {
    return vlora::refused(VLORA_BAD_TILE, "no tile " + std::to_string(index));
  }
  *tile = vlora::kInstances[index].tile;
  return VLORA_OK;
}

int64_t vlora_cuda_workspace(const VloraCall *call, int32_t slices) {
  return call == nullptr || slices < 1 ? 0 : vlora::lay_out(*call, slices).bytes;
}

int32_t vlora_cuda_apply(const VloraCall *call, const VloraTiles *tiles, void *stream_handle) {
  using namespace vlora;
  if (call == nullptr || tiles == nullptr) return refused(VLORA_BAD_ARGUMENT, "a null argument");
  if (const int32_t code = check(*call)) return code;
  if (call->rows == 0 || call->capacity == 0) return VLORA_OK;
  const bool rows = tiles->shrink == VLORA_ROWS;
  const int slices = rows ? 1 : tiles->slices;
  if (slices < 1 || slices > 32) return refused(VLORA_BAD_TILE, "slices must be 1 ... 32");
  const Workspace w = lay_out(*call, slices);
  if (call->workspace == nullptr || !aligned16(call->workspace) ||
      w.bytes > call->workspace_bytes) {
    return refused(VLORA_NO_WORKSPACE, "the workspace needs " + std::to_string(w.bytes) +
                                           " bytes, aligned to 16");
  }
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (rows) return done(apply_rows(*call, w, stream));
  const Instance *shrink = find(tiles->shrink, call->type, false);
  const Instance *expand = find(tiles->expand, call->type, true);
  if (shrink == nullptr || (expand == nullptr && !call->shrink_only)) {
    return refused(VLORA_BAD_TILE, "no tiles " + std::to_string(tiles->shrink) + ", " +
                                       std::to_string(tiles->expand) + " for this type");
  }
  if (const char *what = misaligned(*call)) {
    return refused(VLORA_MISALIGNED, std::string(what) + " is not a multiple of 16 bytes");
  }
  cudaError_t error = plan(*call, w, slices, stream);
  if (error == cudaSuccess) error = shrink->launch(w.shrink, stream);
  if (error == cudaSuccess) error = reduce(*call, w, slices, stream);
  if (error == cudaSuccess && !call->shrink_only) error = expand->launch(w.expand, stream);
  return done(error);
}

const char *vlora_cuda_last_error(void) { return vlora::last_error.c_str(); }

}  // extern "C"

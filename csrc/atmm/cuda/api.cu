// The C interface: checks everything that the host can read, then launches.
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "atmm/segments.h"
#include "kernels.cuh"

namespace vlora {
namespace {

thread_local std::string last_error, fault_text;

int32_t fail(int32_t code, const std::string& why) {
  last_error = why;
  return code;
}

int32_t status_of(cudaError_t error) {
  if (error == cudaSuccess) return VLORA_OK;
  return fail(VLORA_CUDA_ERROR, cudaGetErrorString(error));
}

// Maximum numbers of resident blocks of each kernel on a device, known once kernels are loaded.
struct Device {
  bool warm = false;
  int plan = 0, rows = 0, fused = 0, merge = 0;
  std::vector<int> tiles;
};

constexpr int kMaxDevices = 64;
std::mutex devices_mutex;
Device devices[kMaxDevices];

// Returns the current device, or null with the error in `code`.
const Device* current_device(int32_t* code) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return *code = status_of(error), nullptr;
  const std::lock_guard<std::mutex> lock(devices_mutex);
  if (device >= kMaxDevices || !devices[device].warm) {
    *code = fail(VLORA_COLD, "device " + std::to_string(device) +
                                 ": its kernels are not loaded; call vlora_cuda_warm_up first");
    return nullptr;
  }
  return &devices[device];
}

bool known_type(int type) { return type >= VLORA_FP16 && type <= VLORA_FP32; }

int32_t check(const VloraCall& call) {
  const auto bad = [](const std::string& why) { return fail(VLORA_BAD_ARGUMENT, why); };
  if (call.rows < 0 || call.d_in <= 0 || call.slots < 0 || call.ldx < 0)
    return bad("a size is negative or d_in is 0");
  if (call.max_rank <= 0)
    return bad("max_rank " + std::to_string(call.max_rank) + " is not positive");
  if (call.projection_count < 1 || call.projection_count > VLORA_MAX_PROJECTIONS)
    return bad("projection_count " + std::to_string(call.projection_count) + " is not in 1 ... 8");
  if (call.waves < 1 || call.waves > VLORA_MAX_WAVES)
    return bad("waves " + std::to_string(call.waves) + " is not in 1 ... 8");
  for (int wave = 0; wave < call.waves; ++wave)
    if (call.wave_end[wave] < (wave ? call.wave_end[wave - 1] : 0))
      return bad("wave_end must ascend");
  if (int64_t(call.wave_end[call.waves - 1]) * call.projection_count > 1 << 20)
    return bad("the call has more than 2^20 (segment, projection) problems");
  if (call.shortest < 1 || call.longest < call.shortest)
    return bad("shortest " + std::to_string(call.shortest) + " and longest " +
               std::to_string(call.longest) + " must be ascending lengths from 1");
  if (!known_type(call.type))
    return bad("type " + std::to_string(call.type) +
               " is unknown; valid are 0 (fp16), 1 (bf16), 2 (fp32)");
  if (call.x == nullptr || call.segments == nullptr) return bad("x or segments is null");
  if (call.heads && call.waves > 1)
    return bad("heads need exactly 1 wave, not " + std::to_string(call.waves));
  for (int p = 0; p < call.projection_count; ++p) {
    const VloraProjection& out = call.projections[p];
    if (out.adapters == nullptr || out.y == nullptr || out.ldy < 0 || out.d_out <= 0)
      return bad("projection " + std::to_string(p) + " has a null pointer or no columns");
  }
  return VLORA_OK;
}

// Returns the names of arguments that 16-byte loads and stores cannot access, or null. The loader
// pads ranks to 8.
const char* misaligned(const VloraCall& call) {
  if (!aligned16(call.x) || call.ldx % 8 || call.d_in % 8) return "x, ldx or d_in";
  if (call.max_rank % kRankStep) return "max_rank";
  for (int p = 0; p < call.projection_count; ++p) {
    const VloraProjection& out = call.projections[p];
    if (!aligned16(out.y) || out.ldy % 8 || out.d_out % 8) return "y, ldy or d_out";
  }
  return nullptr;
}

const Instance* find(int index, int type, bool expand) {
  if (index < 0 || index >= kInstanceCount) return nullptr;
  const Instance* instance = kInstances + index;
  return instance->tile.type == type && bool(instance->tile.expand) == expand ? instance : nullptr;
}

int32_t check(const VloraCall& call, const VloraTiles& tiles) {
  const auto bad = [](const std::string& why) { return fail(VLORA_BAD_TILE, why); };
  const bool rows = tiles.shrink == VLORA_ROWS;
  for (int slices : {rows ? 1 : tiles.slices, tiles.row_slices})
    if (slices < 1 || slices > VLORA_MAX_SLICES)
      return bad("slices " + std::to_string(slices) + " is not in 1 ... 32");
  if (tiles.row_block != 1 && tiles.row_block != 4)
    return bad("row_block " + std::to_string(tiles.row_block) + " is neither 1 nor 4");
  if (!call.heads && rows_shared_bytes(call, tiles.row_block) > 48 * 1024)
    return bad("rank " + std::to_string(call.max_rank) +
               " exceeds the shared memory of the row kernels");
  if (rows) return VLORA_OK;
  if (call.heads) return bad("heads can only be computed by the row kernels");
  if (tiles.rows_up_to < 0) return bad("rows_up_to is negative");
  if (find(tiles.shrink, call.type, false) == nullptr ||
      find(tiles.expand, call.type, true) == nullptr)
    return bad("shrink tile " + std::to_string(tiles.shrink) + " or expand tile " +
               std::to_string(tiles.expand) + " does not exist for this type");
  if (const char* what = misaligned(call))
    return fail(VLORA_MISALIGNED, std::string(what) + " is not a multiple of 16 bytes");
  return VLORA_OK;
}

// The grouped products. They compute segments longer than rows_up_to.
class GroupedProducts {
 public:
  GroupedProducts(const VloraCall& call, Workspace* w, const VloraTiles& tiles,
                  const Device& device)
      : call_(call), w_(*w), device_(device), shrink_(tiles.shrink), expand_(tiles.expand) {
    const VloraTile &first = kInstances[shrink_].tile, &second = kInstances[expand_].tile;
    w->shrink.block_rows = first.block[0];
    w->shrink.block_columns = first.block[1];
    w->shrink.slices = slices_of(call.d_in, tiles.slices);
    w->shrink.slice_stride = w->plane;
    w->expand.block_rows = second.block[0];
    w->expand.block_columns = second.block[1];
  }

  cudaError_t shrink(int rows_up_to, cudaStream_t stream) const {
    cudaError_t error = plan(call_, w_, rows_up_to, stream);
    if (error == cudaSuccess)
      error = run(shrink_, w_.shrink, 0, capacity_of(call_), call_.max_rank, stream);
    return error == cudaSuccess ? reduce(call_, w_, device_.plan, stream) : error;
  }

  cudaError_t expand(int wave, cudaStream_t stream) const {
    return run(expand_, w_.expand, wave_begin(call_, wave), call_.wave_end[wave], max_d_out(call_),
               stream);
  }

 private:
  cudaError_t run(int index, const Group& g, int begin, int end, int64_t columns,
                  cudaStream_t stream) const {
    if (begin == end) return cudaSuccess;
    const int64_t tiles =
        max_tiles(call_, g.block_rows, g.block_columns, columns, g.slices.count, end - begin);
    return kInstances[index].launch(g, begin * call_.projection_count, end * call_.projection_count,
                                    int(min64(tiles, device_.tiles[size_t(index)])), stream);
  }

  const VloraCall& call_;
  const Workspace& w_;
  const Device& device_;
  int shrink_, expand_;
};

cudaError_t launch_all(const VloraCall& call, Workspace w, const VloraTiles& tiles,
                       const Device& device, cudaStream_t stream) {
  const RowWork work = row_work(call, tiles);
  const bool uses_rows = call.shortest <= work.up_to, uses_tiles = call.longest > work.up_to;
  cudaError_t error = cudaSuccess;
  const auto next = [&error](cudaError_t result) { error = error == cudaSuccess ? result : error; };
  if (!uses_tiles && can_fuse(call))
    return fused_rows(call, w, work, tiles.row_block, device.fused, stream);
  if (uses_rows) next(shrink_rows(call, w, work, tiles.row_block, device.rows, stream));
  if (call.heads) return error;
  if (uses_tiles) {
    const GroupedProducts grouped(call, &w, tiles, device);
    next(grouped.shrink(work.up_to, stream));
    for (int wave = 0; wave < call.waves; ++wave) {
      if (uses_rows) next(expand_rows(call, w, work, tiles.row_block, wave, device.rows, stream));
      next(grouped.expand(wave, stream));
    }
    return error;
  }
  for (int wave = 0; wave < call.waves; ++wave)
    next(expand_rows(call, w, work, tiles.row_block, wave, device.rows, stream));
  return error;
}

// Texts of the fault codes. The value replaces %.
const char* const kFaults[] = {
    "no fault",
    "starts at row %, outside the call's rows",
    "has % rows, outside the call's shortest ... longest",
    "has the unknown slot %",
    "has the sign %",
    "starts at row %: it overlaps its wave, or does not follow the previous segment",
    "uses slot %, which has A without B",
    "has an adapter of rank %, outside 1 ... max_rank",
    "has an adapter of rank %, not padded to a multiple of 8",
    "uses slot %, whose A or B is not aligned to 16 bytes",
};

}  // namespace
}  // namespace vlora

extern "C" {

int32_t vlora_cuda_version(void) { return 3; }

int32_t vlora_cuda_size_of(int32_t which) {
  constexpr size_t kSizes[] = {sizeof(VloraSegment), sizeof(VloraAdapter),  sizeof(VloraProjection),
                               sizeof(VloraCall),    sizeof(VloraTiles),    sizeof(VloraTile),
                               sizeof(VloraMerge),   sizeof(VloraMergeCall)};
  return which < 0 || which > 7 ? 0 : int32_t(kSizes[which]);
}

int32_t vlora_cuda_tiles(void) { return vlora::kInstanceCount; }

int32_t vlora_cuda_tile(int32_t index, VloraTile* tile) {
  if (index < 0 || index >= vlora::kInstanceCount || tile == nullptr)
    return vlora::fail(VLORA_BAD_TILE, "tile " + std::to_string(index) + " does not exist");
  *tile = vlora::kInstances[index].tile;
  return VLORA_OK;
}

int32_t vlora_cuda_warm_up(void) {
  using namespace vlora;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return status_of(error);
  if (device >= kMaxDevices)
    return fail(VLORA_BAD_ARGUMENT,
                "device " + std::to_string(device) + " exceeds the limit of 64 devices");
  const std::lock_guard<std::mutex> lock(devices_mutex);
  if (devices[device].warm) return VLORA_OK;
  Device loaded;
  loaded.tiles.resize(size_t(kInstanceCount));
  error = warm_plan(&loaded.plan);
  if (error == cudaSuccess) error = warm_rows(&loaded.rows);
  if (error == cudaSuccess) error = warm_fused(&loaded.fused);
  if (error == cudaSuccess) error = warm_merge(&loaded.merge);
  for (int i = 0; i < kInstanceCount && error == cudaSuccess; ++i)
    error = kInstances[i].warm(&loaded.tiles[size_t(i)]);
  if (error != cudaSuccess) return status_of(error);
  loaded.warm = true;
  devices[device] = std::move(loaded);
  return VLORA_OK;
}

int32_t vlora_cuda_arrange(const VloraSegment* segments, int32_t count, VloraSegment* out,
                           int32_t* wave_end) {
  using namespace vlora;
  if (count < 0 || (count > 0 && (!segments || !out || !wave_end)))
    return -fail(VLORA_BAD_ARGUMENT, "an argument is null");
  try {
    std::vector<atmm::Segment> list;
    for (int i = 0; i < count; ++i)
      list.push_back({segments[i].start, segments[i].length, segments[i].slot, segments[i].sign});
    const atmm::SegmentList arranged(std::move(list));
    int written = 0, waves = 0;
    for (int wave = 0; wave < arranged.waves(); ++wave) {
      const int begin = written;
      for (const atmm::Segment* s = arranged.begin(wave); s != arranged.end(wave); ++s)
        out[written++] = {int32_t(s->start), int32_t(s->length), s->slot, s->sign};
      if (written == begin) continue;
      std::sort(out + begin, out + written,
                [](const VloraSegment& a, const VloraSegment& b) { return a.start < b.start; });
      wave_end[waves++] = written;
    }
    return waves;
  } catch (const std::exception& error) {
    return -fail(VLORA_BAD_ARGUMENT, error.what());
  }
}

int64_t vlora_cuda_workspace(const VloraCall* call, const VloraTiles* tiles) {
  using namespace vlora;
  if (call == nullptr || tiles == nullptr || check(*call) || check(*call, *tiles)) return 0;
  VloraCall without_workspace = *call;
  without_workspace.workspace = nullptr;
  return workspace_of(without_workspace, *tiles).bytes;
}

int32_t vlora_cuda_apply(const VloraCall* call, const VloraTiles* tiles, void* stream) {
  using namespace vlora;
  if (call == nullptr || tiles == nullptr) return fail(VLORA_BAD_ARGUMENT, "an argument is null");
  if (const int32_t code = check(*call)) return code;
  if (call->rows == 0 || capacity_of(*call) == 0) return VLORA_OK;
  if (const int32_t code = check(*call, *tiles)) return code;
  const Workspace w = workspace_of(*call, *tiles);
  if (call->workspace == nullptr || !aligned16(call->workspace) || w.bytes > call->workspace_bytes)
    return fail(VLORA_NO_WORKSPACE,
                "the workspace needs " + std::to_string(w.bytes) + " bytes aligned to 16 bytes");
  int32_t code = VLORA_OK;
  const Device* device = current_device(&code);
  if (device == nullptr) return code;
  return status_of(launch_all(*call, w, *tiles, *device, static_cast<cudaStream_t>(stream)));
}

int64_t vlora_cuda_merge_blocks(VloraMerge* merges, int32_t count) {
  int64_t blocks = 0;
  for (int i = 0; merges != nullptr && i < count; ++i) {
    merges[i].first = blocks;
    blocks += vlora::merge_blocks(merges[i]);
  }
  return blocks;
}

int32_t vlora_cuda_merge(const VloraMergeCall* call, void* stream) {
  using namespace vlora;
  if (call == nullptr) return fail(VLORA_BAD_ARGUMENT, "an argument is null");
  if (call->count < 0 || call->blocks < 0 || !known_type(call->type) ||
      (call->sign != 1 && call->sign != -1))
    return fail(VLORA_BAD_ARGUMENT,
                "the count is negative, the type is unknown, or the sign is neither +1 nor -1");
  if (call->count == 0 || call->blocks == 0) return VLORA_OK;
  if (call->out == nullptr || call->base == nullptr || call->merges == nullptr)
    return fail(VLORA_BAD_ARGUMENT, "a pointer is null");
  int32_t code = VLORA_OK;
  const Device* device = current_device(&code);
  if (device == nullptr) return code;
  return status_of(merge(*call, device->merge, static_cast<cudaStream_t>(stream)));
}

const char* vlora_cuda_last_error(void) { return vlora::last_error.c_str(); }

const char* vlora_cuda_fault(uint64_t word) {
  using vlora::fault_text;
  const int code = int(word >> 58), projection = int(word >> 52 & 63);
  const int segment = int(word >> 32 & 0xfffff);
  if (code < 1 || code > VLORA_FAULT_ALIGNMENT) return fault_text.clear(), fault_text.c_str();
  std::string text = vlora::kFaults[code];
  text.replace(text.find('%'), 1, std::to_string(int32_t(word & 0xffffffffu)));
  fault_text = "segment " + std::to_string(segment);
  if (code >= VLORA_FAULT_NULL) fault_text += " in projection " + std::to_string(projection);
  return (fault_text += " " + text + "; it was skipped").c_str();
}

}  // extern "C"

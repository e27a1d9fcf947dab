// The C interface: checks what the host can see, then launches.
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "atmm/segments.h"
#include "kernels.cuh"

namespace vlora {
namespace {

thread_local std::string last_error, fault_text;

int32_t refused(int32_t code, const std::string &why) {
  last_error = why;
  return code;
}

int32_t done(cudaError_t error) {
  if (error == cudaSuccess) return VLORA_OK;
  return refused(VLORA_CUDA_ERROR, cudaGetErrorString(error));
}

// Blocks of each kernel that a device holds at once; there once its kernels are loaded.
struct Device {
  bool warm = false;
  int plan = 0, rows = 0, merge = 0;
  std::vector<int> tiles;
};

constexpr int kDevices = 64;
std::mutex devices_mutex;
Device devices[kDevices];

// Of the current device; null with the reason in `code`.
const Device *device_here(int32_t *code) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return *code = done(error), nullptr;
  const std::lock_guard<std::mutex> lock(devices_mutex);
  if (device >= kDevices || !devices[device].warm) {
    *code = refused(VLORA_COLD, "device " + std::to_string(device) + ": call vlora_cuda_warm_up");
    return nullptr;
  }
  return &devices[device];
}

bool known_type(int type) { return type >= VLORA_FP16 && type <= VLORA_FP32; }

int32_t check(const VloraCall &call) {
  const auto bad = [](const std::string &why) { return refused(VLORA_BAD_ARGUMENT, why); };
  if (call.rows < 0 || call.d_in <= 0 || call.slots < 0 || call.ldx < 0)
    return bad("a negative size");
  if (call.max_rank <= 0) return bad("max_rank must be positive");
  if (call.projection_count < 1 || call.projection_count > VLORA_MAX_PROJECTIONS)
    return bad("projection_count " + std::to_string(call.projection_count) + " is not in 1 ... 8");
  if (call.waves < 1 || call.waves > VLORA_MAX_WAVES)
    return bad("waves " + std::to_string(call.waves) + " is not in 1 ... 8");
  for (int wave = 0; wave < call.waves; ++wave)
    if (call.wave_end[wave] < (wave ? call.wave_end[wave - 1] : 0)) return bad("waves must ascend");
  if (int64_t(call.wave_end[call.waves - 1]) * call.projection_count > 1 << 20)
    return bad("more than 2^20 problems");
  if (call.shortest < 1 || call.longest < call.shortest)
    return bad("shortest ... longest must be lengths from 1");
  if (!known_type(call.type)) return bad("type " + std::to_string(call.type) + " is unknown");
  if (call.x == nullptr || call.segments == nullptr) return bad("x or segments is null");
  if (call.heads && call.waves > 1) return bad("heads of one row: one wave a call");
  for (int p = 0; p < call.projection_count; ++p) {
    const VloraProjection &out = call.projections[p];
    if (out.adapters == nullptr || out.y == nullptr || out.ldy < 0 || out.d_out <= 0)
      return bad("projection " + std::to_string(p) + " has a null pointer or no columns");
  }
  return VLORA_OK;
}

// What 16-byte loads and stores need; ranks are padded to 8 by the loader.
const char *misaligned(const VloraCall &call) {
  if (!aligned16(call.x) || call.ldx % 8 || call.d_in % 8) return "x, ldx or d_in";
  if (call.max_rank % kRankStep) return "max_rank";
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

int32_t check(const VloraCall &call, const VloraTiles &tiles) {
  const auto bad = [](const std::string &why) { return refused(VLORA_BAD_TILE, why); };
  const bool rows = tiles.shrink == VLORA_ROWS;
  for (int slices : {rows ? 1 : tiles.slices, tiles.row_slices})
    if (slices < 1 || slices > VLORA_MAX_SLICES) return bad("slices must be 1 ... 32");
  if (tiles.row_block != 1 && tiles.row_block != 4) return bad("row_block must be 1 or 4");
  if (!call.heads && rows_shared_bytes(call, tiles.row_block) > 48 * 1024)
    return bad("rank " + std::to_string(call.max_rank) + " is above what the row kernels hold");
  if (rows) return VLORA_OK;
  if (call.heads) return bad("heads go through the row kernels");
  if (tiles.rows_up_to < 0) return bad("rows_up_to is negative");
  if (find(tiles.shrink, call.type, false) == nullptr ||
      find(tiles.expand, call.type, true) == nullptr)
    return bad("no tiles " + std::to_string(tiles.shrink) + ", " + std::to_string(tiles.expand) +
               " for this type");
  if (const char *what = misaligned(call))
    return refused(VLORA_MISALIGNED, std::string(what) + " is not a multiple of 16 bytes");
  return VLORA_OK;
}

// The grouped products of segments longer than rows_up_to.
class Products {
 public:
  Products(const VloraCall &call, Workspace *w, const VloraTiles &tiles, const Device &device)
      : call_(call), w_(*w), device_(device), shrink_(tiles.shrink), expand_(tiles.expand) {
    const VloraTile &first = kInstances[shrink_].tile, &second = kInstances[expand_].tile;
    w->shrink.block_rows = first.block[0];
    w->shrink.block_columns = first.block[1];
    w->shrink.slices = cut(call.d_in, tiles.slices);
    w->shrink.slice_stride = w->plane;
    w->expand.block_rows = second.block[0];
    w->expand.block_columns = second.block[1];
  }

  cudaError_t low(int rows_up_to, cudaStream_t stream) const {
    cudaError_t error = plan(call_, w_, rows_up_to, stream);
    if (error == cudaSuccess)
      error = run(shrink_, w_.shrink, 0, capacity_of(call_), call_.max_rank, stream);
    return error == cudaSuccess ? reduce(call_, w_, device_.plan, stream) : error;
  }

  cudaError_t expand(int wave, cudaStream_t stream) const {
    return run(expand_, w_.expand, wave_begin(call_, wave), call_.wave_end[wave], widest(call_),
               stream);
  }

 private:
  cudaError_t run(int index, const Group &g, int begin, int end, int64_t columns,
                  cudaStream_t stream) const {
    if (begin == end) return cudaSuccess;
    const int64_t tiles = most_tiles(call_, g.block_rows, g.block_columns, columns,
                                     g.slices.count, end - begin);
    return kInstances[index].launch(g, begin * call_.projection_count, end * call_.projection_count,
                                    int(least(tiles, device_.tiles[size_t(index)])), stream);
  }

  const VloraCall &call_;
  const Workspace &w_;
  const Device &device_;
  int shrink_, expand_;
};

cudaError_t launch_all(const VloraCall &call, Workspace w, const VloraTiles &tiles,
                       const Device &device, cudaStream_t stream) {
  const RowWork work = row_work(call, tiles);
  const bool rows = call.shortest <= work.up_to, products = call.longest > work.up_to;
  cudaError_t error = cudaSuccess;
  const auto next = [&error](cudaError_t found) { error = error == cudaSuccess ? found : error; };
  if (rows) next(shrink_rows(call, w, work, tiles.row_block, device.rows, stream));
  if (call.heads) return error;
  if (products) {
    const Products by_tiles(call, &w, tiles, device);
    next(by_tiles.low(work.up_to, stream));
    for (int wave = 0; wave < call.waves; ++wave) {
      if (rows) next(expand_rows(call, w, work, tiles.row_block, wave, device.rows, stream));
      next(by_tiles.expand(wave, stream));
    }
    return error;
  }
  for (int wave = 0; wave < call.waves; ++wave)
    next(expand_rows(call, w, work, tiles.row_block, wave, device.rows, stream));
  return error;
}

const char *const kFaults[] = {
    "no fault",
    "starts at row %, outside the call's",
    "has % rows, outside the call's shortest ... longest",
    "has the unknown slot %",
    "has the sign %",
    "starts at row %: it overlaps its wave, or does not follow the one before",
    "goes through slot %, which has A without B",
    "has an adapter of rank %, not in 1 ... max_rank",
    "has an adapter of rank %, not padded to a multiple of 8",
    "goes through slot %, whose A or B does not lie on 16 bytes",
};

}  // namespace
}  // namespace vlora

extern "C" {

int32_t vlora_cuda_version(void) { return 2; }

int32_t vlora_cuda_size_of(int32_t which) {
  constexpr size_t kSizes[] = {sizeof(VloraSegment), sizeof(VloraAdapter),   sizeof(VloraProjection),
                               sizeof(VloraCall),    sizeof(VloraTiles),     sizeof(VloraTile),
                               sizeof(VloraMerge),   sizeof(VloraMergeCall)};
  return which < 0 || which > 7 ? 0 : int32_t(kSizes[which]);
}

int32_t vlora_cuda_tiles(void) { return vlora::kInstanceCount; }

int32_t vlora_cuda_tile(int32_t index, VloraTile *tile) {
  if (index < 0 || index >= vlora::kInstanceCount || tile == nullptr)
    return vlora::refused(VLORA_BAD_TILE, "no tile " + std::to_string(index));
  *tile = vlora::kInstances[index].tile;
  return VLORA_OK;
}

int32_t vlora_cuda_warm_up(void) {
  using namespace vlora;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return done(error);
  if (device >= kDevices) return refused(VLORA_BAD_ARGUMENT, "more than 64 devices");
  const std::lock_guard<std::mutex> lock(devices_mutex);
  if (devices[device].warm) return VLORA_OK;
  Device found;
  found.tiles.resize(size_t(kInstanceCount));
  error = warm_plan(&found.plan);
  if (error == cudaSuccess) error = warm_rows(&found.rows);
  if (error == cudaSuccess) error = warm_merge(&found.merge);
  for (int i = 0; i < kInstanceCount && error == cudaSuccess; ++i)
    error = kInstances[i].warm(&found.tiles[size_t(i)]);
  if (error != cudaSuccess) return done(error);
  found.warm = true;
  devices[device] = std::move(found);
  return VLORA_OK;
}

int32_t vlora_cuda_arrange(const VloraSegment *segments, int32_t count, VloraSegment *out,
                           int32_t *wave_end) {
  using namespace vlora;
  if (count < 0 || (count > 0 && (!segments || !out || !wave_end)))
    return -refused(VLORA_BAD_ARGUMENT, "a null argument");
  try {
    std::vector<atmm::Segment> list;
    for (int i = 0; i < count; ++i)
      list.push_back({segments[i].start, segments[i].length, segments[i].slot, segments[i].sign});
    const atmm::SegmentList arranged(std::move(list));
    int at = 0, waves = 0;
    for (int wave = 0; wave < arranged.waves(); ++wave) {
      const int begin = at;
      for (const atmm::Segment *s = arranged.begin(wave); s != arranged.end(wave); ++s)
        out[at++] = {int32_t(s->start), int32_t(s->length), s->slot, s->sign};
      if (at == begin) continue;
      std::sort(out + begin, out + at, [](const VloraSegment &a, const VloraSegment &b) {
        return a.start < b.start;
      });
      wave_end[waves++] = at;
    }
    return waves;
  } catch (const std::exception &error) {
    return -refused(VLORA_BAD_ARGUMENT, error.what());
  }
}

int64_t vlora_cuda_workspace(const VloraCall *call, const VloraTiles *tiles) {
  using namespace vlora;
  if (call == nullptr || tiles == nullptr || check(*call) || check(*call, *tiles)) return 0;
  VloraCall at_zero = *call;
  at_zero.workspace = nullptr;
  return lay_out(at_zero, *tiles).bytes;
}

int32_t vlora_cuda_apply(const VloraCall *call, const VloraTiles *tiles, void *stream) {
  using namespace vlora;
  if (call == nullptr || tiles == nullptr) return refused(VLORA_BAD_ARGUMENT, "a null argument");
  if (const int32_t code = check(*call)) return code;
  if (call->rows == 0 || capacity_of(*call) == 0) return VLORA_OK;
  if (const int32_t code = check(*call, *tiles)) return code;
  const Workspace w = lay_out(*call, *tiles);
  if (call->workspace == nullptr || !aligned16(call->workspace) || w.bytes > call->workspace_bytes)
    return refused(VLORA_NO_WORKSPACE, "the workspace needs " + std::to_string(w.bytes) +
                                           " bytes, aligned to 16");
  int32_t code = VLORA_OK;
  const Device *device = device_here(&code);
  if (device == nullptr) return code;
  return done(launch_all(*call, w, *tiles, *device, static_cast<cudaStream_t>(stream)));
}

int64_t vlora_cuda_merge_blocks(VloraMerge *merges, int32_t count) {
  int64_t blocks = 0;
  for (int i = 0; merges != nullptr && i < count; ++i) {
    merges[i].first = blocks;
    blocks += vlora::merge_blocks(merges[i]);
  }
  return blocks;
}

int32_t vlora_cuda_merge(const VloraMergeCall *call, void *stream) {
  using namespace vlora;
  if (call == nullptr) return refused(VLORA_BAD_ARGUMENT, "a null argument");
  if (call->count < 0 || call->blocks < 0 || !known_type(call->type) ||
      (call->sign != 1 && call->sign != -1))
    return refused(VLORA_BAD_ARGUMENT, "a negative count, an unknown type, or a sign not +1 or -1");
  if (call->count == 0 || call->blocks == 0) return VLORA_OK;
  if (call->out == nullptr || call->base == nullptr || call->merges == nullptr)
    return refused(VLORA_BAD_ARGUMENT, "a null pointer");
  int32_t code = VLORA_OK;
  const Device *device = device_here(&code);
  if (device == nullptr) return code;
  return done(merge(*call, device->merge, static_cast<cudaStream_t>(stream)));
}

const char *vlora_cuda_last_error(void) { return vlora::last_error.c_str(); }

const char *vlora_cuda_fault(uint64_t word) {
  using vlora::fault_text;
  const int code = int(word >> 58), projection = int(word >> 52 & 63);
  const int segment = int(word >> 32 & 0xfffff);
  if (code < 1 || code > VLORA_FAULT_ALIGNMENT) return fault_text.clear(), fault_text.c_str();
  std::string text = vlora::kFaults[code];
  text.replace(text.find('%'), 1, std::to_string(int32_t(word & 0xffffffffu)));
  fault_text = "segment " + std::to_string(segment);
  if (code >= VLORA_FAULT_NULL) fault_text += " in projection " + std::to_string(projection);
  return (fault_text += " " + text + "; it was left out").c_str();
}

}  // extern "C"

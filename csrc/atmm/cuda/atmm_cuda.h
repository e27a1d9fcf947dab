// ATMM on CUDA: a C interface of raw pointers and one stream.
//
// Semantics of vlora_cuda_apply: for every segment (start, length, slot, sign) with rows
// R = start ... start+length-1, and every projection with (A, B, rank) = adapters[slot]:
//     y[R] += sign * (x[R] A^T) B^T          (B contains the scale)
// With `heads` (vision task heads), y in fp32 and B the bias in fp32:
//     y[R, :rank] = x[R] A^T + bias
// vlora_cuda_merge: out = base + sign * B A for every matrix, summed in fp32 and rounded once.
//
// After vlora_cuda_warm_up, apply and merge do not allocate, synchronise, load code or copy to the
// host. Only the device reads segments and adapter tables, so a captured graph can be replayed with
// other segments of the same capacity. The device skips invalid segments and adapters, and records
// the first fault in the first 8 bytes of the workspace (vlora_cuda_fault). The caller zeroes the
// first VLORA_HEADER_BYTES once, and reads the fault when it next synchronises.
//
// Ownership: every pointer belongs to the caller and must stay valid until the stream has executed
// the call. A workspace can be used by one stream at a time.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { VLORA_FP16 = 0, VLORA_BF16 = 1, VLORA_FP32 = 2 };
enum { VLORA_MAX_PROJECTIONS = 8, VLORA_MAX_WAVES = 8, VLORA_MAX_SLICES = 32 };
// Maximum number of segments, empty ones included, for which the row kernels need one launch, and
// the bytes of the workspace's header: the first fault, and the counters of that launch.
enum { VLORA_FUSED_SEGMENTS = 1024, VLORA_HEADER_BYTES = 32 + 4 * VLORA_FUSED_SEGMENTS };
// Tile index with which the row kernels compute every segment. They accept all types.
enum { VLORA_ROWS = -1 };

enum {
  VLORA_OK = 0,
  VLORA_BAD_ARGUMENT = 1,  // a null pointer, a negative size, an unknown type
  VLORA_BAD_TILE = 2,      // an unknown tile for this type and product
  VLORA_MISALIGNED = 3,    // tensor cores need rows aligned to 16 bytes; the row kernels do not
  VLORA_NO_WORKSPACE = 4,  // null, unaligned, or smaller than vlora_cuda_workspace returns
  VLORA_CUDA_ERROR = 5,    // see vlora_cuda_last_error
  VLORA_COLD = 6           // vlora_cuda_warm_up was not called for this device
};

// The first fault that the device found. It skipped that segment or adapter.
enum {
  VLORA_FAULT_ROWS = 1,      // a segment outside 0 ... rows-1
  VLORA_FAULT_LENGTH = 2,    // a length outside the call's shortest ... longest
  VLORA_FAULT_SLOT = 3,      // a slot outside 0 ... slots-1
  VLORA_FAULT_SIGN = 4,      // a sign that is neither +1 nor -1
  VLORA_FAULT_ORDER = 5,     // overlaps its wave, or follows an empty segment or a later row
  VLORA_FAULT_NULL = 6,      // A without B
  VLORA_FAULT_RANK = 7,      // a rank outside 1 ... max_rank
  VLORA_FAULT_PADDING = 8,   // tiles only: a rank that is not a multiple of 8
  VLORA_FAULT_ALIGNMENT = 9  // tiles only: A or B is not aligned to 16 bytes
};

typedef struct {
  int32_t start, length, slot, sign;
} VloraSegment;

// a: [rank, d_in] and b: [d_out, rank], row-major, in the call's type. a is NULL if the projection
// is not targeted. For tensor cores the loader pads the rank with zeros to a multiple of 8.
typedef struct {
  const void *a, *b;
  int64_t rank;
} VloraAdapter;

typedef struct {
  const VloraAdapter* adapters;  // device, [slots]
  void* y;                       // device, [rows, d_out], rows ldy elements apart
  int64_t ldy;
  int64_t d_out;
} VloraProjection;

// The segments of a wave share no rows and ascend. Segments of length 0 come last and fill the wave
// up to its capacity. Waves run one after another, so that a row's own segment and its -live
// segment are added in order. vlora_cuda_arrange divides any list into waves.
typedef struct {
  const void* x;  // device, [rows, d_in], rows ldx elements apart
  int64_t ldx;
  const VloraSegment* segments;  // device, [wave_end[waves - 1]]
  void* workspace;               // device, aligned to 16 bytes
  int64_t workspace_bytes;
  int32_t rows, d_in, slots, max_rank;
  int32_t type, heads;
  int32_t shortest, longest;  // bounds of the nonzero lengths; they decide which kernels run
  int32_t waves;
  int32_t wave_end[VLORA_MAX_WAVES];
  int32_t projection_count;  // projections that share x: q, k, v; gate, up
  VloraProjection projections[VLORA_MAX_PROJECTIONS];
} VloraCall;

// shrink, expand: tile indices, or VLORA_ROWS for both. slices: depth slices of the shrink, which
// are summed in a fixed order. With any tiles, row kernels compute the segments of at most
// rows_up_to rows, row_block (1 or 4) rows at a time and with row_slices depth slices.
typedef struct {
  int32_t shrink, expand, slices;
  int32_t rows_up_to, row_block, row_slices;
} VloraTiles;

typedef struct {
  int32_t block[3], warp[3], stages;
  int32_t type;    // VLORA_FP16, VLORA_BF16
  int32_t expand;  // 0: shrink, fp32 out; 1: expand, y += in the call's type
  int32_t threads;
  int32_t shared_bytes;
} VloraTile;

// One matrix [d_out, d_in], `offset` elements after the start of its slab. a: [rank, d_in] and
// b: [d_out, rank], row-major fp32. first: index of its first block, set by
// vlora_cuda_merge_blocks.
typedef struct {
  int64_t offset, d_out, d_in, rank;
  const float *a, *b;
  int64_t first;
} VloraMerge;

typedef struct {
  void* out;                 // device; may be `base`
  const void* base;          // device
  const VloraMerge* merges;  // device, [count]
  int64_t blocks;            // as returned by vlora_cuda_merge_blocks
  int32_t count, type, sign;
} VloraMergeCall;

int32_t vlora_cuda_version(void);
// Returns sizeof of a structure: 0 segment, 1 adapter, 2 projection, 3 call, 4 tiles, 5 tile, 6
// merge, 7 merge call.
int32_t vlora_cuda_size_of(int32_t which);
int32_t vlora_cuda_tiles(void);  // number of tile instances in this build
int32_t vlora_cuda_tile(int32_t index, VloraTile* tile);

// Loads every kernel of the current device and sizes its grids. Call it once per device.
int32_t vlora_cuda_warm_up(void);

// Writes all segments that are not empty to `out`, wave by wave and ascending within a wave, and
// the end of each wave to wave_end [count]. All pointers are host memory. Returns the number of
// waves (0 ... count), or a negative error code.
int32_t vlora_cuda_arrange(const VloraSegment* segments, int32_t count, VloraSegment* out,
                           int32_t* wave_end);

// Returns the bytes of workspace that a call needs, or 0 if the call is invalid.
int64_t vlora_cuda_workspace(const VloraCall* call, const VloraTiles* tiles);
int32_t vlora_cuda_apply(const VloraCall* call, const VloraTiles* tiles, void* stream);

// Sets `first` of each merge (host memory) and returns the total number of blocks.
int64_t vlora_cuda_merge_blocks(VloraMerge* merges, int32_t count);
int32_t vlora_cuda_merge(const VloraMergeCall* call, void* stream);

const char* vlora_cuda_last_error(void);      // the calling thread's last error
const char* vlora_cuda_fault(uint64_t word);  // text of a fault word; "" for 0

#ifdef __cplusplus
}
#endif

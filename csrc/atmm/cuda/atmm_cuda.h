// ATMM on CUDA: a C interface of raw pointers and one stream.
//
// Semantics of vlora_cuda_apply: for every segment (start, length, slot, sign), with rows
// R = start ... start+length-1 and (A, B, rank) = projection.adapters[slot]:
//     y[R] += sign * (x[R] A^T) B^T          (scale already folded into B)
// and with shrink_only (vision heads):   y[R, :rank] += sign * x[R] A^T,  y in fp32.
//
// Nothing here allocates, synchronises or copies to the host, and segments and adapter tables are
// read on the device only: a captured graph replays with other segments of the same capacity.
// Ownership: every pointer is the caller's and must live until the stream has passed the call.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { VLORA_FP16 = 0, VLORA_BF16 = 1 };
enum { VLORA_MAX_PROJECTIONS = 4 };
enum { VLORA_ROWS = -1 };  // as a tile index: the kernels for one row a segment

enum {
  VLORA_OK = 0,
  VLORA_BAD_ARGUMENT = 1,   // a null pointer, a negative size, an unknown type
  VLORA_BAD_TILE = 2,       // no such tile for this type and kind
  VLORA_MISALIGNED = 3,     // tensor cores need 16-byte rows; VLORA_ROWS takes any
  VLORA_NO_WORKSPACE = 4,   // smaller than vlora_cuda_workspace says
  VLORA_CUDA_ERROR = 5      // see vlora_cuda_last_error
};

// A segment outside 0 ... rows-1 or with an unknown slot is skipped by the device. A length of 0
// is an empty segment: pad to the capacity with those. Rows of one call's segments are disjoint;
// own and merged-out rows (sign +1, -1) of one step are two calls on the same stream.
typedef struct {
  int32_t start, length, slot, sign;
} VloraSegment;

// a: [rank, d_in], b: [d_out, rank], row-major, in the call's type; a == NULL: not targeted.
// For tensor cores rank is padded with zero rows to a multiple of 8 when the adapter is loaded.
typedef struct {
  const void *a, *b;
  int64_t rank;
} VloraAdapter;

typedef struct {
  const VloraAdapter *adapters;  // device, [slots]
  void *y;                       // device, [rows, d_out], rows ldy elements apart
  int64_t ldy;
  int64_t d_out;
} VloraProjection;

typedef struct {
  const void *x;  // device, [rows, d_in], rows ldx elements apart
  int64_t ldx;
  int32_t rows, d_in, slots, max_rank;
  const VloraSegment *segments;  // device, [capacity]
  int32_t capacity;
  int32_t projection_count;  // projections that share x: q, k, v; gate, up
  VloraProjection projections[VLORA_MAX_PROJECTIONS];
  int32_t type;         // VLORA_FP16, VLORA_BF16
  int32_t shrink_only;  // vision heads
  void *workspace;      // device, 16-byte aligned
  int64_t workspace_bytes;
} VloraCall;

// shrink: index of a shrink tile or VLORA_ROWS; expand likewise (both VLORA_ROWS or neither).
// slices: depth slices of the shrink, summed in a fixed order (1 ... 32).
typedef struct {
  int32_t shrink, expand, slices;
} VloraTiles;

typedef struct {
  int32_t block[3], warp[3], stages;
  int32_t type;    // VLORA_FP16, VLORA_BF16
  int32_t expand;  // 0: shrink, fp32 out; 1: expand, y += in the call's type
  int32_t threads;
  int32_t shared_bytes;
} VloraTile;

int32_t vlora_cuda_version(void);
int32_t vlora_cuda_tiles(void);                          // instances in this build
int32_t vlora_cuda_tile(int32_t index, VloraTile *tile);
int64_t vlora_cuda_workspace(const VloraCall *call, int32_t slices);
int32_t vlora_cuda_apply(const VloraCall *call, const VloraTiles *tiles, void *stream);
const char *vlora_cuda_last_error(void);                 // of this thread

#ifdef __cplusplus
}
#endif

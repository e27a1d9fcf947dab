// Products of rows with a row-major matrix, and the operations between the products of a layer. No
// torch, no Python, no ownership.
#pragma once

#include "runtime/dispatch.h"
#include "runtime/machine.h"
#include "runtime/tile_unit.h"
#include "runtime/types.h"

namespace vlora::gemm {

// y[t, n] = bias[n] + sum over k of x[t, k] W[n, k]. x, y and the sums are fp32; W has its storage
// type.
struct Product {
  Dtype dtype;    // of W
  const void* w;  // [n, k]; for other kernels with `AmxGemm`, what their header says
  int64_t n, k;
  const float* x;  // [rows, k]
  int64_t rows;
  ptrdiff_t x_stride;  // elements between rows
  float* y;            // [rows, n]
  ptrdiff_t y_stride;
  const float* bias;  // [n], or null
  // W is [gates; ups]. y, [rows, n / 2], gets silu(x gates^T) * (x ups^T).
  bool gated = false;
};

// A gemv multiplies a few rows of x, and keeps the sums along the depth in registers. It divides
// the rows of W into this many equal parts and reads one row of each part at a time: a core
// receives more data from several such streams than from one.
//
// A gemm multiplies more rows. x is packed in panels of kLanes rows, and values of W are broadcast
// against them.
constexpr int kStreams = 4;
// Number of rows of W in a block of a gemm, a multiple of the height of every register tile.
constexpr int kBlockRows = 48;
// Elements between rows of x that a gemv has packed, a multiple of every step.
inline ptrdiff_t packed_stride(int64_t k) { return ceil_div(k, 2 * kLanes) * 2 * kLanes; }
// Rows of W in a tile that reads them in place. A tall tile uses all accumulators. It has at most
// kTallTile rows, because the general registers hold no more addresses. A short tile is for rows
// that fall on the same sets of L1: six of them fit into eight ways.
constexpr int kTallTile = 12, kShortTile = 6;
// Maximum number of panels in a piece of a gemm, chosen so that its sums stay in L2.
constexpr int kMaxPiecePanels = 16;

// Rows [from, to) of W times `panels` panels of x. For a gemv, rows [from, to) of each stream.
struct Piece {
  int64_t from, to;
  int64_t panel, panels;
  int64_t next = -1;       // first row of W of this thread's next piece, or -1
  bool streaming = false;  // whether y is too large for the caches, so that stores bypass them
  int64_t rows_in_l1 = 0;  // rows of W that fit L1 together; for a gemm that reads W in place
};

// Depth [from, from + count) of a product. Every slice after the first adds its sums to y.
struct Slice {
  int64_t from, count;
};

// For each token its row of the table, or the row that replaces it, as fp32.
struct Embedding {
  Dtype dtype;                  // of the table
  const void* table;            // [words, width]
  const int64_t* tokens;        // [rows]; ignored where the row is replaced
  const int64_t* replacements;  // [rows] addresses of fp32 rows, 0 for none; or null
  float* out;                   // [rows, width]
  int64_t rows, width;
};

// hidden += delta; out = hidden / sqrt(mean of its squares + eps) * weight, for each row.
struct Norm {
  float* hidden;        // [rows, width], as are delta and out
  const float* delta;   // or null
  const float* weight;  // [width]
  float* out;
  int64_t rows, width;
  float eps;
};

// The norm of each head of `heads` queries and `kv_heads` keys in place, for each row; values
// follow.
struct HeadNorm {
  float* qkv;                              // [rows, (heads + 2 kv_heads) dim]
  const float *query_weight, *key_weight;  // [dim]
  int64_t rows, heads, kv_heads, dim;
  float eps;
};

// out = silu(first half of x) * second half of x, for each row.
struct Gate {
  const float* x;  // [rows, 2 width]
  float* out;      // [rows, width]
  int64_t rows, width;
};

// The index of the first largest value of each row, and whether all values of the row are finite.
struct Argmax {
  const float* x;  // [rows, width]
  int64_t* index;  // [rows]; any valid index where the row is not finite
  bool* finite;    // [rows]
  int64_t rows, width;
};

// One draw from a row of scores. The softmax at `temperature` gives probabilities. Of the tokens,
// those with at least min_p times the largest probability remain, then the top_k largest (0: all),
// then the smallest set with a mass of top_p. The result is the token at the quantile `uniform`, in
// [0, 1), of these tokens in the order of their index.
struct Draw {
  int64_t row, top_k;
  float temperature, min_p;
  double top_p, uniform;
};

struct Sample {
  const float* scores;  // [rows, width]; each row has a finite value and no NaN
  int64_t width;
  const Draw* draws;
  int64_t* tokens;  // one for each draw
  int64_t count;    // number of draws
};

// A gemm on vectors. Both pointers are null if the instruction set does not have it.
struct VectorGemm {
  // Packs panels [from, until) of x.
  void (*pack)(const Product&, float* panels, int64_t from, int64_t until);
  void (*run)(const Product&, const float* panels, const Piece&, float* scratch);
};

// The kernels of an instruction set. Arrays are indexed by the type of W.
struct Kernels {
  // Packs rows [from, until) of x for `gemv`, packed_stride() elements apart; null if `gemv` reads
  // them in place.
  void (*pack_gemv[kDtypes])(const Product&, float* to, int64_t from, int64_t until);
  void (*gemv[kDtypes])(const Product&, const float* x, ptrdiff_t x_stride, const Piece&);
  int max_gemv_rows[kDtypes];  // with more rows of x, a gemm is faster
  // W is read in place, or copied to scratch as fp32 with a constant stride. In place, bf16 is
  // multiplied in pairs, so k must be even. fp32 is never copied by instruction sets whose tiles
  // have so few rows that these fit L1 at any stride.
  VectorGemm in_place[kDtypes], copied[kDtypes];
  void (*embed)(const Embedding&, int64_t from, int64_t until);
  void (*add_norm)(const Norm&, int64_t from, int64_t until);
  void (*gate)(const Gate&, int64_t from, int64_t until);
  void (*argmax)(const Argmax&, int64_t from, int64_t until);
  void (*sample)(const Sample&, int64_t from, int64_t until);
};
const Kernels& kernels(runtime::Isa isa);

// Floats for W in the scratch of `AmxGemm::run`. The sums follow: kAmxBlockRows x kLanes per panel.
constexpr int64_t kAmxScratch = 10240;
// The depth of a slice is a multiple of this: whole tiles, and whole blocks of quantized weights.
constexpr int64_t kSliceStep = 64;

// The gemm of a tile unit, by type of W. x is packed in panels of ceil(count / 32) KiB, for fp32
// three times as large (runtime::kLimbs). A piece is kAmxBlockRows rows of W.
struct AmxGemm {
  void (*pack[kDtypes])(const Product&, const Slice&, char* panels, int64_t from, int64_t until);
  void (*run[kDtypes])(const Product&, const Slice&, const char* panels, const Piece&,
                       char* scratch);
};
// Returns null if the instruction set has no such unit.
const AmxGemm* amx_gemm(runtime::Isa isa);
// Returns the gemm of the tile unit if it is faster than vectors for this type of W, else null.
const AmxGemm* amx_gemm_for(Dtype dtype);

// Floats for the copy of a block of W.
constexpr int64_t kCopyFloats = kBlockRows * (256 + 16);
// Floats for the scratch of `VectorGemm::run`: two copies, and the sums of a block.
constexpr int64_t kVectorScratch = 2 * kCopyFloats + int64_t(kMaxPiecePanels) * kBlockRows * kLanes;

// Returns how many rows of a matrix, `stride` bytes apart, a tile can read together, at most
// kTallTile. Their lines leave one way of each set of L1 free for x.
int64_t rows_in_l1(const runtime::Machine& machine, int64_t stride);
// Returns the rows of a tile that reads W in place, given its accumulators and its registers of x.
constexpr int in_place_tile_rows(int accumulators, int registers, int64_t rows_in_l1) {
  const int rows = accumulators / registers;
  const int tall = rows < kTallTile ? rows : kTallTile;
  return tall <= rows_in_l1 ? tall : kShortTile;
}

// amx: the gemm of a tile unit, or null to use vectors.
void multiply(const Kernels& kernels, const AmxGemm* amx, const Product& product, int threads);
// Multiplies with the tile unit, whatever the number of rows.
void multiply_by_tiles(const AmxGemm& amx, const Product& product, int threads);
void embed(const Kernels& kernels, const Embedding& embedding, int threads);
void add_norm(const Kernels& kernels, const Norm& norm, int threads);
void head_norm(const Kernels& kernels, const HeadNorm& norm, int threads);
void gate(const Kernels& kernels, const Gate& gate, int threads);
// out = gate of the product. product.y, [rows, n], is scratch, which may stay unwritten.
void multiply_gated(const Kernels& kernels, const AmxGemm* amx, const Product& product, float* out,
                    int threads);
void argmax(const Kernels& kernels, const Argmax& argmax, int threads);
void sample(const Kernels& kernels, const Sample& sample, int threads);

}  // namespace vlora::gemm

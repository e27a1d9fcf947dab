// Products of rows with a row-major matrix, and the operations between the products of a layer. No
// torch, no Python, no ownership.
#pragma once

#include "runtime/dispatch.h"
#include "runtime/machine.h"
#include "runtime/tile_unit.h"
#include "runtime/types.h"

namespace vlora::gemm {

// y[t, n] = bias[n] + sum over k of x[t, k] W[n, k]. x, y and the sums are fp32; W is as stored.
struct Product {
  Dtype dtype;    // of W
  const void* w;  // [n, k]
  int64_t n, k;
  const float* x;  // [rows, k]
  int64_t rows;
  ptrdiff_t x_stride;  // elements between rows
  float* y;            // [rows, n]
  ptrdiff_t y_stride;
  const float* bias;  // [n], or null
  // W is [gates; ups], and y, [rows, n / 2], gets silu(product with the gates) * product with the
  // ups.
  bool gated = false;
};

// A gemv multiplies a few rows of x, and sums along the depth are kept in registers. It divides W
// into this many parts of equally many rows and reads one row of each part at a time. One core
// receives more from several such streams than from one.
//
// A gemm multiplies more rows: x is packed in panels of kLanes rows, and values of W are broadcast
// against them.
constexpr int kStreams = 4;
// Rows of W in a block of a gemm: a multiple of the height of every register tile.
constexpr int kBlockRows = 48;
// Elements between rows of x that a gemv has packed: a multiple of every step.
inline ptrdiff_t packed_stride(int64_t k) { return ceil_div(k, 2 * kLanes) * 2 * kLanes; }
// Rows of W in a tile that reads them in place. A tall tile uses all accumulators, but has at most
// kTallTile rows: the addresses of more do not fit the general registers. A short tile is for rows
// that fall on the same sets of L1; six of them fit eight ways.
constexpr int kTallTile = 12, kShortTile = 6;
// Maximum number of panels in a piece of a gemm, chosen so that its sums stay in L2.
constexpr int kMaxPiecePanels = 16;

// Rows [from, to) of W times `panels` panels of x; for a gemv, rows [from, to) of each stream.
struct Piece {
  int64_t from, to;
  int64_t panel, panels;
  int64_t next = -1;       // first row of W of the piece that this thread does next, or -1
  bool streaming = false;  // whether y is too large for the caches, so that stores bypass them
  int64_t rows_in_l1 = 0;  // of W at the same time; for a gemm that reads W in place
};

// Depth [from, from + count) of a product. Every slice after the first one adds its sums to y.
struct Slice {
  int64_t from, count;
};

// The row of the table for each token, or the row that replaces it, as fp32.
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

// One draw from a row of scores: softmax at `temperature`; from it the tokens with at least min_p
// times the largest probability, from those the top_k largest (0: all), from those the smallest set
// with a mass of top_p; then the token at the quantile `uniform`, in [0, 1), of the remaining
// tokens in order of their index.
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

// A gemm by vectors. Both pointers are null if the instruction set does not have it.
struct VectorGemm {
  // Packs panels [from, until) of x.
  void (*pack)(const Product&, float* panels, int64_t from, int64_t until);
  void (*run)(const Product&, const float* panels, const Piece&, float* scratch);
};

// The kernels of an instruction set. Arrays are indexed by the type of W.
struct Kernels {
  // Packs rows [from, until) of x as `gemv` reads them, packed_stride() elements apart; null if it
  // reads them in place.
  void (*pack_gemv[kDtypes])(const Product&, float* to, int64_t from, int64_t until);
  void (*gemv[kDtypes])(const Product&, const float* x, ptrdiff_t x_stride, const Piece&);
  int max_gemv_rows[kDtypes];  // with more rows of x, a gemm is faster
  // W is read in place, or copied to scratch as fp32, where its rows are a constant stride apart.
  // In place, bf16 is multiplied in pairs, so k must be even. fp32 is not copied by instruction
  // sets whose tiles have so few rows that these fit L1 at any stride.
  VectorGemm in_place[kDtypes], copied[kDtypes];
  void (*embed)(const Embedding&, int64_t from, int64_t until);
  void (*add_norm)(const Norm&, int64_t from, int64_t until);
  void (*gate)(const Gate&, int64_t from, int64_t until);
  void (*argmax)(const Argmax&, int64_t from, int64_t until);
  void (*sample)(const Sample&, int64_t from, int64_t until);
};
const Kernels& kernels(runtime::Isa isa);

// Floats for W in the scratch of `AmxGemm::run`. The sums follow: kAmxBlockRows x kLanes for each
// panel.
constexpr int64_t kAmxScratch = 10240;

// The gemm of a unit that multiplies tiles, by the type of W. x is packed in panels of ceil(count /
// 32) KiB, for fp32 three times as large (runtime::kLimbs); a piece is kAmxBlockRows rows of W.
struct AmxGemm {
  void (*pack[kDtypes])(const Product&, const Slice&, char* panels, int64_t from, int64_t until);
  void (*run[kDtypes])(const Product&, const Slice&, const char* panels, const Piece&,
                       char* scratch);
};
// Returns null if the instruction set has no such unit.
const AmxGemm* amx_gemm(runtime::Isa isa);

// Floats for the copy of a block of W.
constexpr int64_t kCopyFloats = kBlockRows * (256 + 16);
// Floats for the scratch of `VectorGemm::run`: two copies, and the sums of a block.
constexpr int64_t kVectorScratch = 2 * kCopyFloats + int64_t(kMaxPiecePanels) * kBlockRows * kLanes;

// Returns how many rows of a matrix, `stride` bytes apart, a tile can read at the same time, at most
// kTallTile: in every set of L1, the lines being read leave a way free for x.
int64_t rows_in_l1(const runtime::Machine& machine, int64_t stride);
// Returns the rows of a tile that reads W in place, for its accumulators and its registers of x.
constexpr int in_place_tile_rows(int accumulators, int registers, int64_t rows_in_l1) {
  const int rows = accumulators / registers;
  const int tall = rows < kTallTile ? rows : kTallTile;
  return tall <= rows_in_l1 ? tall : kShortTile;
}

// amx: null if tiles are not to be used for this type.
void multiply(const Kernels& kernels, const AmxGemm* amx, const Product& product, int threads);
void embed(const Kernels& kernels, const Embedding& embedding, int threads);
void add_norm(const Kernels& kernels, const Norm& norm, int threads);
void gate(const Kernels& kernels, const Gate& gate, int threads);
// out = gate of the product. product.y, [rows, n], is scratch and need not be written.
void multiply_gated(const Kernels& kernels, const AmxGemm* amx, const Product& product, float* out,
                    int threads);
void argmax(const Kernels& kernels, const Argmax& argmax, int threads);
void sample(const Kernels& kernels, const Sample& sample, int threads);

}  // namespace vlora::gemm

// Products of few or many rows with a row-major matrix. No torch, no Python, no ownership.
#pragma once

#include "runtime/dispatch.h"
#include "runtime/tile_unit.h"
#include "runtime/types.h"

namespace vlora::gemm {

// y[t, n] = bias[n] + sum over k of x[t, k] W[n, k]. Sums and both sides in fp32, W as it is stored.
struct Product {
  Dtype dtype;  // of W
  const void* w;
  int64_t n, k;
  const float* x;
  int64_t rows;
  ptrdiff_t x_stride;  // elements from row to row
  float* y;
  ptrdiff_t y_stride;
  const float* bias;  // or null
  bool gated = false;  // W is [gates; ups], y [rows, n / 2] gets silu(product with gates) * product with ups
};

constexpr int kFewRows = 12;
// Up to so many rows a group of W's rows meets each row of x in registers, along the depth; beyond,
// x is packed in panels of kLanes rows, and W's values are broadcast against them.
constexpr int kBlock = 48;
// Rows of W in a block: a multiple of every register tile.
constexpr int kPanels = 16;
// Most panels in a piece of work: their sums stay in L2.

// Rows [from, to) of W times `panels` panels of x; next: the row that follows in this thread, or -1.
struct Piece {
  int64_t from, to;
  int64_t panel, panels;
  int64_t next = -1;
  bool past_caches = false;  // y, of which the caches would not hold all
};

// Depth [from, from + count) of a product; after the first one sums are added to y.
struct Slice {
  int64_t from, count;
};

// The row of the table that each token names, or what stands instead of it, as fp32.
struct Embedding {
  Dtype dtype;             // of the table
  const void* table;       // [words, width]
  const int64_t* tokens;   // [rows]; of any value where something stands instead
  const int64_t* instead;  // [rows] addresses of fp32 rows, 0 for none; or null
  float* out;              // [rows, width]
  int64_t rows, width;
};

// hidden += delta, if there is one; out = hidden / sqrt(mean of its squares + eps) * weight, by row.
struct Norm {
  float* hidden;  // [rows, width], as are delta and out
  const float* delta;
  const float* weight;
  float* out;
  int64_t rows, width;
  float eps;
};

// out = silu(the first half of x) * the second half, by row.
struct Gate {
  const float* x;  // [rows, 2 width]
  float* out;      // [rows, width]
  int64_t rows, width;
};

// The first largest value of each row, and whether all of the row's are finite.
struct Largest {
  const float* x;  // [rows, width]
  int64_t* at;     // [rows]; of a row that is not finite some place
  bool* finite;    // [rows]
  int64_t rows, width;
};

// A draw from one row of scores: softmax at `temperature`; of it the tokens of at least min_p of the
// largest, of them the top_k largest (0: all), of them the smallest set that holds top_p; the token at
// `uniform` in [0, 1) of what is left, in order of place.
struct Draw {
  int64_t row, top_k;
  float temperature, min_p;
  double top_p, uniform;
};

struct Sample {
  const float* scores;  // [rows, width]; a row has a finite value, and no NaN
  int64_t width;
  const Draw* draws;
  int64_t* tokens;  // one for each draw
  int64_t count;    // of draws
};

// Both null where the instruction set has no such.
struct Many {
  void (*pack)(const Product&, float* panels, int64_t from, int64_t until);
  void (*run)(const Product&, const float* panels, const Piece&, float* scratch);
};

// What an instruction set provides, by the type of W.
struct Kernels {
  // Some rows of x as `few` reads them. Null: in place.
  void (*pack_few[kDtypes])(const Product&, float* to, int64_t from, int64_t until);
  void (*few[kDtypes])(const Product&, const float* x, ptrdiff_t x_stride, const Piece&);
  // W is read where it lies, or copied to scratch on the way, as fp32: its rows are then a constant
  // stride apart. In place: bf16 is multiplied in pairs, of which a row is a whole number. Fp32 is never
  // copied where the few rows of a tile leave room in L1 for theirs.
  Many in_place[kDtypes], copied[kDtypes];
  void (*embed)(const Embedding&, int64_t from, int64_t until);
  void (*add_norm)(const Norm&, int64_t from, int64_t until);
  void (*gate)(const Gate&, int64_t from, int64_t until);
  void (*largest)(const Largest&, int64_t from, int64_t until);
  void (*sample)(const Sample&, int64_t from, int64_t until);
};
const Kernels& kernels(runtime::Isa isa);

constexpr int64_t kTiledScratch = 10240;
// Floats for W in the scratch of `Tiled::run`; after them the sums, kTileRows by kLanes for each panel.

// What a unit that multiplies tiles of bf16 has, by the type of W: x goes in panels of ceil(count / 32) KiB, for
// fp32 in three such (runtime::kLimbs), W in pieces of kTileRows rows.
struct Tiled {
  void (*pack[kDtypes])(const Product&, const Slice&, char* panels, int64_t from, int64_t until);
  void (*run[kDtypes])(const Product&, const Slice&, const char* panels, const Piece&, char* scratch);
  void (*release)();  // after a thread's last
};
// Null where the instruction set has none.
const Tiled* tiled(runtime::Isa isa);

constexpr int64_t kCopyFloats = kBlock * (256 + 16);
// Of a block of W; two of them and its sums are the scratch of `many`.
constexpr int64_t kScratch = 2 * kCopyFloats + int64_t(kPanels) * kBlock * kLanes;

// tiled: of a unit that multiplies tiles, where it is to be used for this type; else null.
void multiply(const Kernels& kernels, const Tiled* tiled, const Product& product, int threads);
void embed(const Kernels& kernels, const Embedding& embedding, int threads);
void add_norm(const Kernels& kernels, const Norm& norm, int threads);
void gate(const Kernels& kernels, const Gate& gate, int threads);
// gate of the product; product.y, [rows, n], may be left as it was.
void multiply_gated(const Kernels& kernels, const Tiled* tiled, const Product& product, float* out,
                    int threads);
void largest(const Kernels& kernels, const Largest& largest, int threads);
void sample(const Kernels& kernels, const Sample& sample, int threads);

}  // namespace vlora::gemm

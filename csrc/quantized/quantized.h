// Products of rows with a matrix of int8 or int4 weights. No torch, no Python, no ownership.
#pragma once

#include "gemm/gemm.h"
#include "runtime/dispatch.h"
#include "runtime/types.h"

namespace vlora::quantized {

// Values of depth in a block. Rows of W are stored in whole blocks. The values that fill the last
// block of a row are finite.
constexpr int64_t kBlock = 64;
// Smallest number of values that share a scale.
constexpr int64_t kMinGroup = 32;
// Rows of int4 weights in a panel for AVX2, and in a panel for a tile unit or AVX-512 VNNI.
constexpr int64_t kPanelRows = 8, kTilePanelRows = 16;
// Panels of kPanelRows rows that a gemv multiplies together.
constexpr int64_t kPanelsAtOnce = 4;

// The zero of int4 without stored zeros, and the unit of stored ones.
constexpr float kMiddle = 8, kZeroStep = 0.125f;

// Element (n, k) of the matrix is scale * (value - zero), with the scale and the zero of its group.
//
// int8: `values` holds signed bytes in order; there are no zeros.
// int4: a block is 16 words of 16 bits. Bits 4j to 4j + 3 of word i are value 16 j + i. A zero is
// stored as its distance from 8, in eighths. Without `zeros`, every zero is 8.
//
// int4 in panels: some adjacent rows lie together, so that one register has values of all of them.
// 32 values of a row, which share a scale, are 16 bytes. A panel has the first 4 bytes of each of
// its rows, then the next 4 bytes of each, and so on. It has the first scale of each row, then the
// next of each, and so on, and its zeros in the same order. The number of rows is a multiple of
// those of a panel.
// In panels of kPanelRows rows, byte i of the 16 bytes has value i in its low bits and value 16 + i
// in its high bits. In panels of kTilePanelRows rows, bits 4j to 4j + 3 of 16-bit word w of the 16
// bytes are value 8 (w / 2) + 2j + w % 2.
struct Weight {
  int bits;               // 8 or 4
  const uint8_t* values;  // [n, row_bytes()]
  const float* scales;    // [n, groups()]
  const int8_t* zeros;    // [n, groups()], or null
  int64_t n, k;
  int group_shift;     // logarithm of the values that share a scale; kWholeRow: all of a row
  int64_t panel_rows;  // kPanelRows, kTilePanelRows, or 0 if W is in rows

  static constexpr int kWholeRow = 62;
  float zero(int64_t index) const { return kMiddle + kZeroStep * float(zeros[index]); }
  bool has_row_scales() const { return group_shift == kWholeRow; }
  int64_t blocks() const { return ceil_div(k, kBlock); }
  int64_t row_bytes() const { return blocks() * kBlock * bits / 8; }
  int64_t groups() const { return ((blocks() * kBlock - 1) >> group_shift) + 1; }
};

// y[t, n] = bias[n] + sum over k of x[t, k] W[n, k], in fp32.
struct Product {
  Weight w;
  const float* x;  // [rows, k]
  int64_t rows;
  ptrdiff_t x_stride;  // elements between rows
  float* y;            // [rows, n]
  ptrdiff_t y_stride;
  const float* bias;  // [n], or null
};

// A gemv of few rows of x.
struct Gemv {
  // Packs x: rows * depth in whole blocks, in fp32 or bf16. If W has zeros, the zero terms of the
  // groups of x follow (zeros.h). For W in panels of kPanelRows rows, see panels_avx2.h.
  void (*pack)(const Product&, void* to);
  // Multiplies rows [from, to) of each of gemm::kStreams streams of W with packed x; the last piece
  // also multiplies the rows that no stream has. For W in panels, it multiplies panels [from, to).
  void (*run)(const Product&, const void* x, int64_t from, int64_t to);
};

// Returns the number of floats that `Gemv::pack` needs.
inline int64_t gemv_scratch(const Product& p) {
  if (p.w.panel_rows) return p.rows * p.w.blocks() * (kBlock / kMinGroup) * (kMinGroup + 2);
  const int64_t sums = p.w.bits == 4 ? ceil_div(p.w.groups(), int64_t(kLanes)) * kLanes : 0;
  return p.rows * (p.w.blocks() * kBlock + sums);
}

struct Quantization;  // quantize.h

// The kernels of an instruction set.
struct Kernels {
  Gemv fp32;          // with weights and x in fp32
  Gemv pairs;         // with both in bf16; null if the CPU does not multiply bf16 pairs
  int max_gemv_rows;  // of x
  // Writes rows [from, to) of W to `out` as fp32 or bf16, k values apart.
  void (*widen[kDtypes])(const Weight&, int64_t from, int64_t to, void* out);
  // The same for W in panels of kPanelRows rows; null if the instruction set does not multiply
  // them. Whole panels are converted.
  Gemv panels;
  void (*widen_panels[kDtypes])(const Weight&, int64_t from, int64_t to, void* out);
  // Quantizes rows [from, to) of a matrix. Returns the first bad one or -1, as `quantize` does.
  int64_t (*quantize)(const Quantization&, int64_t from, int64_t to);
};
const Kernels& kernels(runtime::Isa isa);

// Returns the gemm of a tile unit for int8 in rows, or null if the instruction set has no such
// unit. `gemm::Product::w` is the address of the Weight. Products in fp32 are only for W with one
// scale for each output.
const gemm::AmxGemm* amx_gemm(runtime::Isa isa);

// Numbers of digits, signed bytes, that a value of x is split into. A gemv of kMaxDigits would not
// be faster than one that converts W.
constexpr int kMinDigits = 2, kMaxDigits = 4, kMaxGemvDigits = 3;
// Returns the fewest digits, at most `most`, that represent x about as exactly as the type of the
// product does, except a few small values of each row, or 0.
using FewestDigits = int (*)(const Product&, Dtype, int most);

// Rows of W in a block of a product of digits.
constexpr int64_t kDigitBlock = 32;
// Largest depth for which sums of products of bytes fit 32 bits.
constexpr int64_t kMaxDigitDepth = 1 << 16;

// Rows of x as integers that are split into signed bytes, their digits.
struct Digits {
  float* factors;  // [rows]: the product with the digits of a row is multiplied by its factor
  char* tiles;     // [panels / 2][depth / 64][2 panels, or the last one][16][64]
  int64_t panels;  // of 16 / DigitGemm::digits rows
};

// The gemm of a tile unit for int8 with one scale for each output (gemm_amx_digits.h).
struct DigitGemm {
  int digits;  // of a value of x
  // Packs panels [from, until).
  void (*pack)(const Product&, const Digits& to, int64_t from, int64_t until);
  // Multiplies blocks [from, to) of W.
  void (*run)(const Product&, const Digits& x, int64_t from, int64_t to);
};
struct DigitGemms {
  DigitGemm of[kDtypes];  // by type of the product
  FewestDigits fewest;
};
// Returns null if the instruction set has no such unit.
const DigitGemms* digit_gemms(runtime::Isa isa);

// A gemv of digits by vectors, for int8 with one scale for each output (gemv_digits.h).
struct DigitGemv {
  Gemv of[kMaxGemvDigits - kMinDigits + 1];  // by number of digits, from kMinDigits on
  FewestDigits fewest;
};
// Returns null if the instruction set does not multiply bytes.
const DigitGemv* digit_gemv(runtime::Isa isa);

// Returns the number of floats for the factors of rows of x, which are read in whole registers.
inline int64_t padded_factors(const Product& p) {
  return (ceil_div(p.rows, int64_t(kLanes)) + 1) * kLanes;
}
// Returns the number of floats that `Gemv::pack` needs for a number of digits.
inline int64_t digit_gemv_scratch(const Product& p, int digits) {
  return padded_factors(p) + p.rows * digits * (p.w.blocks() + 1) * kBlock / 4;
}

// Rows of x, and a part of the depth, for which a tile unit multiplies W in panels at a time.
struct PanelSlice {
  Dtype dtype;
  int64_t row, rows;    // of x
  int64_t from, count;  // depth, in groups of kMinGroup values
  int tile_rows;        // rows of x in a tile, one of TilePanels::tile_rows; 16 if `rounded`
  bool rounded;         // whether weights are rounded to bf16; only for products in bf16
  bool streaming;       // whether y bypasses the caches; its rows are then whole cache lines

  // The sums of the slice are added to y, except those of the first slice of the depth.
  bool adds() const { return from > 0; }
  // Tiles of x for each tile of depth.
  int limbs() const { return dtype == Dtype::kFp32 ? runtime::kLimbs : 1; }
  int64_t tiles() const { return ceil_div(rows, tile_rows); }
  // Bytes of the values of a packed tile of rows, and of the whole tile. Its zero terms follow.
  int64_t value_bytes() const { return count * limbs() * tile_rows * 64; }
  int64_t tile_bytes() const { return value_bytes() + ceil_div(count * tile_rows, 16) * 64; }
  int64_t scratch_bytes() const;
};
// The depth of a slice is a multiple of the largest group, except at the end of W.
constexpr int64_t kSliceGroups = 4;
// KiB of scratch for converted weights and sums of a group. The sums of all rows of x with two
// panels follow.
constexpr int64_t kPanelScratch = 34;
inline int64_t PanelSlice::scratch_bytes() const {
  return (kPanelScratch << 10) + tiles() * tile_rows * 2 * kLanes * 4;
}

// Kernels of a tile unit for W in panels of kTilePanelRows rows.
struct TilePanels {
  // Packs tiles [from, until) of rows of x.
  void (*pack)(const Product&, const PanelSlice&, char* to, int64_t from, int64_t until);
  // Multiplies panels [from, to) with all rows of the slice.
  void (*run)(const Product&, const PanelSlice&, const char* x, int64_t from, int64_t to,
              char* scratch);
  // Numbers of rows of x in a tile for which there are kernels, in ascending order up to kAmxRows.
  // The remaining elements are zero.
  int tile_rows[5];
};
// Returns null if the instruction set has no such unit.
const TilePanels* tile_panels(runtime::Isa isa);

// Maximum number of rows of x in a tile of digits.
constexpr int64_t kMaxDigitTile = 8;

// Kernels of vectors for W in panels of kTilePanelRows rows (panels_digits.h).
struct PanelDigits {
  // Returns the bytes of a packed row of x.
  int64_t (*row_bytes)(const Weight&, int digits);
  // Returns the fewest digits that represent x about as exactly as the type of the product does, or
  // 0 if kMaxDigits are not enough.
  int (*digits)(const Product&, Dtype);
  // The following are by number of digits, from kMinDigits on. Packs x.
  void (*pack[kMaxDigits - kMinDigits + 1])(const Product&, char* to);
  // Multiplies panels [from, to) of W with packed x.
  void (*run[kMaxDigits - kMinDigits + 1])(const Product&, const char* x, int64_t from, int64_t to);
  // Writes rows [from, to) of W, which are whole panels, to `out` as fp32 or bf16, k values apart.
  void (*widen[kDtypes])(const Weight&, int64_t from, int64_t to, void* out);
};
// Returns null if the instruction set has no such kernels.
const PanelDigits* panel_digits(runtime::Isa isa);

// Returns the number of rows of the panels in which int4 weights should be stored for the
// instruction set in use: kTilePanelRows, kPanelRows, or 0 for rows.
int64_t preferred_panel_rows();

// dtype: the type in which weights and x are multiplied. For bf16, x is rounded to bf16 where the
// CPU multiplies pairs of bf16 fast, unless it is split into digits. So are converted weights,
// except the exact integers of int8 with one scale for each output and of int4 in panels of
// kTilePanelRows rows. A single row, which memory limits, is in fp32 or split into digits unless W
// is in such panels. Few rows with W in panels of kPanelRows rows are always in fp32.
//
// Throws std::invalid_argument if W is in panels that the instruction set in use does not multiply.
void multiply(const Product& product, Dtype dtype, int threads);

}  // namespace vlora::quantized

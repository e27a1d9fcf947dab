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
// Rows of W in a panel of int4 weights.
constexpr int64_t kPanelRows = 8;
// Panels that a gemv multiplies together.
constexpr int64_t kPanelsAtOnce = 4;

// The zero of int4 without stored zeros, and the unit of stored ones.
constexpr float kMiddle = 8, kZeroStep = 0.125f;

// Element (n, k) of the matrix is scale * (value - zero), with the scale and the zero of its group.
//
// int8: `values` holds signed bytes in order; there are no zeros.
// int4: a block is 16 words of 16 bits. Bits 4j to 4j + 3 of word i are value 16 j + i. A zero is
// stored as its distance from 8, in eighths. Without `zeros`, every zero is 8.
//
// int4 in panels: kPanelRows adjacent rows lie together, so that one register has values of all of
// them. 32 values of a row, which share a scale, are 16 bytes: byte i has value i in its low bits
// and value 16 + i in its high bits. A panel has the first 4 bytes of each of its rows, then the
// next 4 bytes of each, and so on. It has the first scale of each row, then the next of each, and
// so on, and its zeros in the same order. The number of rows is a multiple of kPanelRows.
struct Weight {
  int bits;               // 8 or 4
  const uint8_t* values;  // [n, row_bytes()]
  const float* scales;    // [n, groups()]
  const int8_t* zeros;    // [n, groups()], or null
  int64_t n, k;
  int group_shift;  // logarithm of the values that share a scale; kWholeRow: all of a row
  bool panels;      // for the kernels that have `Kernels::panels`

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
  // groups of x follow (zeros.h). For W in panels, see panels_avx2.h.
  void (*pack)(const Product&, void* to);
  // Multiplies rows [from, to) of each of gemm::kStreams streams of W with packed x; the last piece
  // also multiplies the rows that no stream has. For W in panels, multiplies panels [from, to).
  void (*run)(const Product&, const void* x, int64_t from, int64_t to);
};

// Returns the number of floats that `Gemv::pack` needs.
inline int64_t gemv_scratch(const Product& p) {
  if (p.w.panels) return p.rows * p.w.blocks() * (kBlock / kMinGroup) * (kMinGroup + 2);
  const int64_t sums = p.w.bits == 4 ? ceil_div(p.w.groups(), int64_t(kLanes)) * kLanes : 0;
  return p.rows * (p.w.blocks() * kBlock + sums);
}

struct Quantization;  // quantize.h

// The kernels of an instruction set.
struct Kernels {
  Gemv fp32;   // with weights and x in fp32
  Gemv pairs;  // with both in bf16; null if the CPU does not multiply bf16 pairs
  int max_gemv_rows;  // of x
  // Writes rows [from, to) of W to `out` as fp32 or bf16, k values apart.
  void (*widen[kDtypes])(const Weight&, int64_t from, int64_t to, void* out);
  // The same for W in panels; null if the instruction set multiplies rows only. Whole panels are
  // converted.
  Gemv panels;
  void (*widen_panels[kDtypes])(const Weight&, int64_t from, int64_t to, void* out);
  // Quantizes rows [from, to) of a matrix. Returns the first bad one or -1, as `quantize` does.
  int64_t (*quantize)(const Quantization&, int64_t from, int64_t to);
};
const Kernels& kernels(runtime::Isa isa);

// Returns the gemm of a tile unit for W in rows, or null if the instruction set has no such unit.
// `gemm::Product::w` is the address of the Weight. Products in fp32 are only for int8 with a scale
// for each output.
const gemm::AmxGemm* amx_gemm(runtime::Isa isa);

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
  // Returns whether digits represent x about as exactly as the type of the product does.
  bool (*is_exact)(const Product&);
};
// The gemms by type of the product. Their functions are null if the instruction set has no such
// unit.
struct DigitGemms {
  DigitGemm of[kDtypes];
};
const DigitGemms* digit_gemms(runtime::Isa isa);

// Returns whether int4 weights should be stored in panels for the instruction set in use.
bool prefers_panels();

// dtype: the type in which weights and x are multiplied. For bf16, converted weights are rounded to
// bf16, and so is x where the CPU multiplies pairs of bf16 fast. A single row, which memory limits,
// is always in fp32, and so are few rows with W in panels.
//
// Throws std::invalid_argument if W is in panels, but the instruction set in use multiplies rows
// only.
void multiply(const Product& product, Dtype dtype, int threads);

}  // namespace vlora::quantized

// Quantization of float matrices to int8 and int4. No torch, no Python, no ownership.
#pragma once

#include "quantized/quantized.h"

namespace vlora::quantized {

// A float matrix, and the memory of the quantized matrix that is made of it: int8 without zeros, or
// int4 in rows, whose zeros are all 8 if `zeros` is null. The largest int4 group has kMaxGroup
// values.
struct Quantization {
  Dtype dtype;
  const void* weights;  // [n, k]
  ptrdiff_t stride;     // elements between rows of `weights`
  int bits;             // this and the following members are those of Weight
  uint8_t* values;
  float* scales;
  int8_t* zeros;
  int64_t n, k;
  int group_shift;
  bool whole_zeros;  // whether zeros are integers from 0 to 15

  Weight result() const { return {bits, values, scales, zeros, n, k, group_shift, 0}; }
};

constexpr int kMaxGroup = 128;

// int8: the largest absolute value of a group becomes 127.
//
// int4: the range between the extremes of a group, or without zeros the one around 0 that contains
// it, is divided into 15 steps. Then the zero and the scale with the smallest squared error for the
// rounded values are computed, and the values are rounded again, kRefits times. The fit starts from
// the extremes times each of kRanges, and the result with the smaller squared error is used.
// vlora/kernels/quantize.py is the same in plain torch.
constexpr float kRanges[] = {1.0f, 0.9f};
constexpr int kRefits = 2;

// Quantizes a matrix. Returns the index of the first row with a value that is not finite or too
// large to be quantized, or -1. The result is then undefined.
int64_t quantize(const Quantization& quantization, int threads);

// Packs int4 whose values are in order, two in a byte, the first in its low bits, as a matrix in
// rows. stored: n rows of `bytes` bytes, `stride` bytes apart; their last block may be incomplete.
void pack_int4(const uint8_t* stored, ptrdiff_t stride, int64_t bytes, uint8_t* values, int64_t n,
               int64_t row_bytes, int threads);

// Rearranges a matrix in rows into panels, in place (see Weight, and dynamic.h for int8).
// row_bytes, groups: of a row. zeros: or null. panel_rows: kPanelRows, or kTilePanelRows.
void interleave(int bits, uint8_t* values, float* scales, int8_t* zeros, int64_t n,
                int64_t row_bytes, int64_t groups, int64_t panel_rows, int threads);

}  // namespace vlora::quantized

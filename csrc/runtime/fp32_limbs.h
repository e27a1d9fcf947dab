// fp32 values split into limbs of bf16, and factors packed as tiles. Included after the tile
// registers of an instruction set (tile_amx.h or tile_twin.h). These define Fp32Line (32 fp32
// values) and Bf16Line (32 bf16 values, a line of a tile).
//
// fp32 has 24 significant bits and bf16 has 8, so three limbs add up exactly to the value. Of the
// nine products of the limbs of two values, kernels compute the six largest and sum them in fp32.
// Leaving out the other three is the only error. A value that is not finite has limbs that are not
// finite, and products with it are NaN or infinite. There are two ways to split:
//
// split_truncated: each limb is the upper half of the remaining bits. The error is below 2^-21 of a
// product and 2^-23 on average, about as much as rounding a sum to fp32 loses. A limb costs a mask
// and a subtraction. Gemms use it, because they split their factors in every call.
//
// split_rounded: each limb is the bf16 nearest to the remainder, so later limbs are smaller. The
// error is below 2^-25 of a product. A limb costs two more conversions. Merges use it: they split a
// factor once for many products, and their result is compared with the rounded sum bit by bit.
#pragma once

#include "runtime/tile_unit.h"

namespace vlora::runtime::VLORA_ISA {

struct Limbs {
  Bf16Line line[kLimbs];
};

VLORA_INLINE Limbs split_truncated(Fp32Line x) {
  Limbs limbs;
  for (int i = 0; i + 1 < kLimbs; ++i) limbs.line[i] = x.take_upper_half();
  limbs.line[kLimbs - 1] = x.rounded();  // exact, since 8 bits remain
  return limbs;
}

VLORA_INLINE Limbs split_rounded(Fp32Line x) {
  Limbs limbs;
  for (int i = 0; i + 1 < kLimbs; ++i) limbs.line[i] = x.take_rounded();
  limbs.line[kLimbs - 1] = x.rounded();
  return limbs;
}

// Stores the limbs as lines of row-major tiles (a left factor), `limb_bytes` bytes apart.
VLORA_INLINE void store_limbs(const Limbs& limbs, char* to, ptrdiff_t limb_bytes) {
  for (int i = 0; i < kLimbs; ++i) limbs.line[i].store(to + i * limb_bytes);
}

// Packs 16 rows of x, `count` values each, as tiles of a right factor. Each line of a tile holds
// one pair of depth of all rows. Rows from `rows` on and values from `count` on are zero.
// split(values, lines) makes kLines lines, and so tiles, of 32 values.
template <int kLines, class Split>
VLORA_INLINE void pack_columns(const float* x, ptrdiff_t stride, int rows, int count, char* to,
                               const Split& split) {
  alignas(64) Bf16Line staged[kLines][kAmxRows];
  for (int t = 0; t < kAmxRows; ++t, x += stride) {
    Bf16Line lines[kLines];
    split(t < rows ? Fp32Line::load_some(x, count) : Fp32Line::zero(), lines);
    for (int i = 0; i < kLines; ++i) staged[i][t] = lines[i];
  }
  for (int i = 0; i < kLines; ++i, to += sizeof staged[0]) transpose_pairs(staged[i], to);
}

// Packs one tile, with the values rounded to bf16.
inline void pack_rounded_columns(const float* x, ptrdiff_t stride, int rows, int count, char* to) {
  pack_columns<1>(x, stride, rows, count, to,
                  [](const Fp32Line& values, Bf16Line* lines)
                      __attribute__((always_inline)) { lines[0] = values.rounded(); });
}

// Packs one tile for each limb.
inline void pack_limb_columns(const float* x, ptrdiff_t stride, int rows, int count, char* to) {
  pack_columns<kLimbs>(x, stride, rows, count, to,
                       [](const Fp32Line& values, Bf16Line* lines) __attribute__((always_inline)) {
                         const Limbs limbs = split_truncated(values);
                         for (int i = 0; i < kLimbs; ++i) lines[i] = limbs.line[i];
                       });
}

}  // namespace vlora::runtime::VLORA_ISA

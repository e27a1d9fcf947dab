// Types of int8 and int4 weights: how a gemv reads and multiplies them. An unpack header must be
// included before.
#pragma once

#include "quantized/quantized.h"
#include "runtime/bf16.h"

namespace vlora::quantized::VLORA_ISA {

using gemm::kStreams;

constexpr bool kManyRegisters = R::kWidth == 16;  // 32 registers instead of 16

// Types for each kind of weight. Value: registers with kStep weights, or with as many values of x.
// X: type of packed values of x. Block: stored weights of a block. Scales: data of a group from
// which `weights` computes weights. kTileRows: maximum number of rows of x in a tile.
// streams(rows): rows of W in a tile, limited by the registers for sums and factors.

// Weights and x are fp32.
struct Fp32Values {
  using Value = R;
  using X = float;
  static constexpr int kStep = R::kWidth;
  static VLORA_INLINE R load_x(const float* x) { return R::load(x); }
  static VLORA_INLINE void add(R& sum, const R& weights, const R& x) {
    sum.add_product(weights, x);
  }
  static VLORA_INLINE void pack(const float* x, float* to) { R::load(x).store(to); }
};

// Int4 whose zeros are all 8, or int4 in which each group has its own zero. A gemv multiplies as if
// all zeros were 8, and then corrects the sums (`add_zeros`).
template <bool has_zeros>
struct Int4 : Fp32Values {
  using Block = Nibbles;
  using Scales = Factors;
  static constexpr int kBlockBytes = int(kBlock) / 2;
  static constexpr bool kGrouped = true;
  static constexpr int kTileRows = kManyRegisters ? 8 : 4;
  static constexpr int streams(int rows) { return rows <= (kManyRegisters ? 4 : 1) ? kStreams : 2; }
  static VLORA_INLINE Scales scales(const Weight& w, int64_t index) {
    return Factors::of(w.scales[index], has_zeros ? w.zero(index) : kMiddle);
  }
  static VLORA_INLINE Block load(const uint8_t* p) { return Nibbles::load(p); }
  static VLORA_INLINE R weights(const Block& block, const Scales& scales, int step) {
    return block.weights(scales, step);
  }
};

// Int8 with several scales in a row, or with one, by which sums are multiplied in the end.
template <bool grouped>
struct Int8 : Fp32Values {
  using Block = const int8_t*;
  using Scales = R;
  static constexpr int kBlockBytes = int(kBlock);
  static constexpr bool kGrouped = grouped;
  static constexpr int kTileRows = kManyRegisters ? 6 : 4;
  static constexpr int streams(int rows) { return rows <= (kManyRegisters ? 6 : 1) ? kStreams : 2; }
  static VLORA_INLINE Scales scales(const Weight& w, int64_t index) {
    return R::all(w.scales[index]);
  }
  static VLORA_INLINE Block load(const uint8_t* p) { return reinterpret_cast<const int8_t*>(p); }
  static VLORA_INLINE R weights(const Block& block, const Scales& scales, int step) {
    const R values = load_bytes(block + step * R::kWidth);
    if constexpr (grouped) return values * scales;
    return values;
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
// Weights and x are rounded to bf16, and multiplied in pairs.
struct PairValues {
  using Value = R::Pairs;
  using X = uint16_t;
  static constexpr int kStep = 2 * R::kWidth;
  static VLORA_INLINE Value load_x(const uint16_t* x) { return R::load_pairs(x); }
  static VLORA_INLINE void add(R& sum, const Value& weights, const Value& x) {
    sum.add_pairs(weights, x);
  }
  static VLORA_INLINE void pack(const float* x, uint16_t* to) {
    R::store_two(R::load(x), R::load(x + R::kWidth), to);
  }
};

struct PairsOfInt4 : PairValues {
  using Block = NibblePairs;
  using Scales = FactorPairs;
  static constexpr int kBlockBytes = Int4<false>::kBlockBytes;
  static constexpr bool kGrouped = true;
  static constexpr int kTileRows = Int4<false>::kTileRows;
  static constexpr int streams(int rows) { return Int4<false>::streams(rows); }
  static VLORA_INLINE Scales scales(const Weight& w, int64_t index) {
    return FactorPairs::of(Int4<false>::scales(w, index));
  }
  static VLORA_INLINE Block load(const uint8_t* p) { return NibblePairs::load(p); }
  static VLORA_INLINE Value weights(const Block& block, const Scales& scales, int step) {
    return block.weights(scales, step);
  }
};

template <bool grouped>
struct PairsOfInt8 : PairValues {
  using Block = const int8_t*;
  using Scales = R;
  static constexpr int kBlockBytes = int(kBlock);
  static constexpr bool kGrouped = grouped;
  static constexpr int kTileRows = Int8<grouped>::kTileRows;
  static constexpr int streams(int rows) { return Int8<grouped>::streams(rows); }
  static VLORA_INLINE Scales scales(const Weight& w, int64_t index) {
    return Int8<grouped>::scales(w, index);
  }
  static VLORA_INLINE Block load(const uint8_t* p) { return Int8<grouped>::load(p); }
  static VLORA_INLINE Value weights(const Block& block, const Scales& scales, int step) {
    return pairs_of(Int8<grouped>::weights(block, scales, 2 * step),
                    Int8<grouped>::weights(block, scales, 2 * step + 1));
  }
};
#endif

}  // namespace vlora::quantized::VLORA_ISA

// The microbenchmarks of one instruction set. Each set compiles them in one generated unit, which
// includes this file after its vectors.
#pragma once

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

#ifdef VLORA_HAS_BF16_PRODUCTS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

#ifdef VLORA_HAS_TILES
// Multiplies blocks of two by two tiles of zeros, in the order of the kernels.
inline double tile_peak(int64_t rounds) {
  using U = TileRegisters;
  using Block = TileBlock<2, 2>;
  configure(kAmxRows, kAmxRows, kAmxRows);
  Block::zero();
  U::zero<4>(), U::zero<5>(), U::zero<6>(), U::zero<7>();
  // Multiplying a block takes about as long as eight rounds on vectors.
  const int64_t blocks = rounds / 8 + 1;
  for (int64_t i = 0; i < blocks; ++i) Block::multiply();
  return double(blocks) * 4 * kAmxRows * kAmxRows * 2 * kAmxRows * 2;
}
#endif

inline double peak(Dtype dtype, int64_t rounds) {
#ifdef VLORA_HAS_TILES
  if (dtype == Dtype::kBf16) return tile_peak(rounds);
#endif
  constexpr int kAccumulators = kPeakAccumulators;
  V acc[kAccumulators];
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) acc[a] = V::zero();
  const float one = 1;
#ifdef VLORA_HAS_BF16_PRODUCTS
  if (dtype == Dtype::kBf16) {
    alignas(64) const float line[kLanes] = {};
    const V::Pairs s = V::broadcast_pair(&one);
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
      for (int a = 0; a < kAccumulators; ++a) {
        acc[a].add_pairs(s, V::load_pairs(reinterpret_cast<const char*>(line)));
        acc[a].keep();
      }
  }
#endif
  if (dtype == Dtype::kFp32 || !kPairs) {
    const V::Scalar s = V::broadcast(&one);
    V b = V::zero();
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
      for (int a = 0; a < kAccumulators; ++a) {
        // Without fused multiply-add, the compiler would multiply only once.
        b.keep();
        acc[a].add_product(s, b);
        acc[a].keep();
      }
  }
  volatile float sink = 0;
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) sink = sink + acc[a].sum();
  return 2.0 * (dtype == Dtype::kBf16 && kPairs ? 2 : 1) * kLanes * kAccumulators * double(rounds);
}

inline float read(const float* values, int64_t count) {
  V acc[8];
#pragma GCC unroll 8
  for (int a = 0; a < 8; ++a) acc[a] = V::zero();
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes)
#pragma GCC unroll 8
    for (int a = 0; a < 8; ++a) acc[a].add(V::load(values + i + a * kLanes));
  float sum = 0;
#pragma GCC unroll 8
  for (int a = 0; a < 8; ++a) sum += acc[a].sum();
  return sum;
}

}  // namespace vlora::runtime::VLORA_ISA

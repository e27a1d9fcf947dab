// The microbenchmarks of an instruction set. Included in one generated unit of each, after its vectors.
#pragma once

#include "cpu/types.h"

namespace vlora::cpu::VLORA_ISA {

#ifdef VLORA_HAS_BF16_PRODUCTS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

inline double peak(Dtype dtype, int64_t rounds) {
  constexpr int kAccumulators = kPeakAccumulators;
  V acc[kAccumulators];
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) acc[a] = V::zero();
  const float one = 1;
#ifdef VLORA_HAS_BF16_PRODUCTS
  if (dtype == Dtype::kBf16) {
    const V::Pairs s = V::broadcast_pair(&one);
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
      for (int a = 0; a < kAccumulators; ++a) {
        acc[a].add_pairs(s, s);
        asm volatile("" : "+v"(acc[a].r));
      }
  }
#endif
  if (dtype == Dtype::kFp32 || !kPairs) {
    const V::Scalar s = V::broadcast(&one);
    V b = V::zero();
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 16
      for (int a = 0; a < kAccumulators; ++a) {
        acc[a].add_product(s, b);
        VLORA_KEEP(acc[a]);
      }
  }
  volatile float sink = 0;
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) sink = sink + sum_of(acc[a]);
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
  for (int a = 0; a < 8; ++a) sum += sum_of(acc[a]);
  return sum;
}

}  // namespace vlora::cpu::VLORA_ISA

// Copies around the register tiles, and the microbenchmarks of an instruction set.
#pragma once

#include "atmm/kernels.h"

namespace vlora::atmm::ATMM_ISA {

#ifdef ATMM_HAS_BF16_PRODUCTS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

inline void load_rows(Dtype dtype, const void* x, ptrdiff_t stride, int64_t rows, int64_t count,
                      void* to, ptrdiff_t to_stride) {
  const int64_t whole = count / kPanel * kPanel;
  for (int64_t row = 0; row < rows; ++row) {
    float* out = static_cast<float*>(to) + row * to_stride;
    if (dtype == Dtype::kFp32) {
      const float* in = static_cast<const float*>(x) + row * stride;
      for (int64_t i = 0; i < whole; i += kPanel) V::load(in + i).store(out + i);
      for (int64_t i = whole; i < count; ++i) out[i] = in[i];
    } else if (kPairs) {
      const uint16_t* in = static_cast<const uint16_t*>(x) + row * stride;
      uint16_t* pairs = reinterpret_cast<uint16_t*>(out);
      __builtin_memcpy(pairs, in, size_t(count) * 2);
      if (count % 2) pairs[count] = 0;
    } else {
      const uint16_t* in = static_cast<const uint16_t*>(x) + row * stride;
      for (int64_t i = 0; i < whole; i += kPanel) V::load(in + i).store(out + i);
      if (whole < count) {
        const int some = int(count - whole);
        V::load_some(in + whole, some).store_some(out + whole, some);
      }
      if (count % 2) out[count] = 0;
    }
  }
}

inline void round_rows(float* scratch, int64_t rows, int64_t count) {
  for (int64_t row = 0; row < rows; ++row) {
    float* from = scratch + row * kRowStride;
    if (count % 2) from[count] = 0;
    if (!kPairs) continue;
    uint16_t* pairs = reinterpret_cast<uint16_t*>(from);
    // In place: what is written lies before what is still to be read.
    for (int64_t i = 0; i < count; i += kPanel) V::load(from + i).store(pairs + i);
    if (count % 2) pairs[count] = 0;
  }
}

inline void widen_panels(const Tile& t, int columns, float* to) {
  for (int64_t group = 0; group < t.groups; ++group)
    for (int64_t step = 0; step < t.steps; ++step) {
      const char* from = t.panels + group * t.group_bytes + step * t.step_bytes;
      for (int half = 0; half < 2; ++half)
        for (int c = 0; c < columns; ++c, to += kPanel)
          V::load_half_of_pairs(from + c * 64, half).store(to);
    }
}

inline double peak(Dtype dtype, int64_t rounds) {
  constexpr int kAccumulators = kPeakAccumulators;
  V acc[kAccumulators];
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) acc[a] = V::zero();
  const float one = 1;
#ifdef ATMM_HAS_BF16_PRODUCTS
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
        ATMM_KEEP(acc[a]);
      }
  }
  volatile float sink = 0;
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) sink = sink + sum_of(acc[a]);
  return 2.0 * (dtype == Dtype::kBf16 && kPairs ? 2 : 1) * kPanel * kAccumulators * double(rounds);
}

inline float read(const float* values, int64_t count) {
  V acc[8];
#pragma GCC unroll 8
  for (int a = 0; a < 8; ++a) acc[a] = V::zero();
  for (int64_t i = 0; i + 8 * kPanel <= count; i += 8 * kPanel)
#pragma GCC unroll 8
    for (int a = 0; a < 8; ++a) acc[a].add(V::load(values + i + a * kPanel));
  float sum = 0;
#pragma GCC unroll 8
  for (int a = 0; a < 8; ++a) sum += sum_of(acc[a]);
  return sum;
}

}  // namespace vlora::atmm::ATMM_ISA

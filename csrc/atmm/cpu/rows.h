// Copies between rows, packed panels and the scratch memory of the register tiles.
#pragma once

#include "atmm/kernels.h"

namespace vlora::atmm::VLORA_ISA {

using runtime::VLORA_ISA::V;

#ifdef VLORA_HAS_BF16_PRODUCTS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

template <class T>
void load_row(const T* in, int64_t count, bool pairs, float* out) {
  const int64_t full = count / kPanel * kPanel;  // in whole vectors
  const int rest = int(count - full);
  if (pairs) {
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    if constexpr (sizeof(T) == sizeof(*to)) {
      __builtin_memcpy(to, in, size_t(count) * sizeof(T));
    } else {
      for (int64_t i = 0; i < full; i += kPanel) V::load(in + i).store(to + i);
      if (rest) V::load_some(in + full, rest).store_some(to + full, rest);
    }
    if (count % 2) to[count] = 0;
  } else {
    for (int64_t i = 0; i < full; i += kPanel) V::load(in + i).store(out + i);
    if (rest) V::load_some(in + full, rest).store_some(out + full, rest);
    if (count % 2) out[count] = 0;
  }
}

inline void load_rows(Dtype dtype, bool pairs, const void* x, ptrdiff_t stride, int64_t rows,
                      int64_t count, void* to, ptrdiff_t to_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    float* const out = static_cast<float*>(to) + row * to_stride;
    if (dtype == Dtype::kFp32)
      load_row(static_cast<const float*>(x) + row * stride, count, pairs, out);
    else
      load_row(static_cast<const uint16_t*>(x) + row * stride, count, pairs, out);
  }
}

inline void round_rows(float* scratch, int64_t rows, int64_t count) {
  for (int64_t row = 0; row < rows; ++row) {
    float* from = scratch + row * kScratchStride;
    if (count % 2) from[count] = 0;
    if (!kPairs) continue;
    uint16_t* pairs = reinterpret_cast<uint16_t*>(from);
    // In place this is safe, because the writes stay behind the reads.
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

inline void deinterleave_narrow(const void* lines, int64_t count, void* to) {
  auto* from = static_cast<const uint32_t*>(lines);
  auto* out = static_cast<uint32_t*>(to);
  for (int64_t i = 0; i < count; ++i, from += kPanel, out += kPanel)
    for (int n = 0; n < kPanel / 2; ++n) {
      out[n] = from[2 * n];
      out[kPanel / 2 + n] = from[2 * n + 1];
    }
}

template <class T>
void add_sums_to(T* y, ptrdiff_t y_stride, const float* sums, ptrdiff_t sums_stride, int64_t rows,
                 int64_t columns, float sign) {
  const V::Scalar s = V::broadcast(&sign);
  for (int64_t row = 0; row < rows; ++row, y += y_stride, sums += sums_stride)
    for (int64_t n = 0; n < columns; n += kPanel) {
      const int count = int(columns - n < kPanel ? columns - n : kPanel);
      V sum = count == kPanel ? V::load(y + n) : V::load_some(y + n, count);
      sum.add_product(s, V::load(sums + n));
      if (count == kPanel)
        sum.store(y + n);
      else
        sum.store_some(y + n, count);
    }
}

inline void add_sums(Dtype dtype, void* y, ptrdiff_t y_stride, const float* sums,
                     ptrdiff_t sums_stride, int64_t rows, int64_t columns, float sign) {
  if (dtype == Dtype::kFp32)
    add_sums_to(static_cast<float*>(y), y_stride, sums, sums_stride, rows, columns, sign);
  else
    add_sums_to(static_cast<uint16_t*>(y), y_stride, sums, sums_stride, rows, columns, sign);
}

}  // namespace vlora::atmm::VLORA_ISA

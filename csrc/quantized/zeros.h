// Correction of a product for the zeros of int4 groups. The kernels multiply as if every zero were
// 8. Included after the instruction set's unpack header.
#pragma once

#include <algorithm>

#include "quantized/quantized.h"

namespace vlora::quantized::VLORA_ISA {

// Number of floats between the zero terms of rows of x.
inline int64_t zero_terms_stride(const Weight& w) { return ceil_div(w.groups(), kLanes) * kLanes; }

// Writes the zero terms of the rows of x. The term of a group of inputs is the change of a product
// with scale 1 if the zero of the group is one step larger.
inline void pack_zero_terms(const Product& p, float* to) {
  const int64_t stride = zero_terms_stride(p.w), size = int64_t(1) << p.w.group_shift;
  for (int64_t t = 0; t < p.rows; ++t, to += stride) {
    const float* const x = p.x + t * p.x_stride;
    for (int64_t group = 0; group < stride; ++group) {
      const int64_t from = group * size, until = std::min(p.w.k, from + size);
      R sum = R::zero();
      int64_t k = from;
      for (; k + R::kWidth <= until; k += R::kWidth) sum = sum + R::load(x + k);
      float total = sum_of(sum);
      for (; k < until; ++k) total += x[k];
      to[group] = -total * kZeroStep;
    }
  }
}

// Corrects the sums of a row of W with T rows of x for the zeros of the row.
template <int T>
VLORA_INLINE void add_zeros(const Weight& w, int64_t first_scale, const float* terms,
                            R (&sums)[T]) {
  const int64_t groups = w.groups(), stride = zero_terms_stride(w);
  for (int64_t group = 0; group < groups; group += R::kWidth) {
    const int count = int(std::min<int64_t>(groups - group, R::kWidth));
    const int64_t at = first_scale + group;
    const R factors = scaled_zeros(w.scales + at, w.zeros + at, count);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sums[t].add_product(factors, R::load(terms + t * stride + group));
  }
}

}  // namespace vlora::quantized::VLORA_ISA

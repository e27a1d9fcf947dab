// A merge's end for vectors of two registers. Included as tile.h is, which it goes on from.
#pragma once

#include "tile.h"

namespace vlora::atmm::VLORA_ISA {

// out = in + sign * tile, of bf16, with panels that have the even ones of their columns first: in a line of
// `in` and of `out` they are a shift or a mask away, and no lanes are crossed.
struct AddedApart : Added<uint16_t, false> {
  template <int M, int N>
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t, int64_t group) {
    const uint16_t* in = static_cast<const uint16_t*>(t.in) + group * t.group_columns;
    uint16_t* out = static_cast<uint16_t*>(t.out) + group * t.group_columns;
    const V::Scalar sign = V::broadcast(&t.sign);
    const bool cut = t.tail < kPanel && group == t.groups - 1;
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const uint16_t* from = in + m * t.in_stride + n * kPanel;
        uint16_t* to = out + m * t.out_stride + n * kPanel;
        uint16_t some[kPanel] = {};
        const bool last = n == N - 1 && cut;
        if (last)
          for (int i = 0; i < t.tail; ++i) some[i] = from[i];
        V sum = V::load_apart(last ? some : from);
        sum.add_product(sign, acc[m][n]);
        sum.store_together(last ? some : to);
        if (last)
          for (int i = 0; i < t.tail; ++i) to[i] = some[i];
      }
    }
  }
};

}  // namespace vlora::atmm::VLORA_ISA

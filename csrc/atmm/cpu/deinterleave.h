// The epilogue of a bf16 merge for vectors that take two registers. A generated unit includes it
// instead of tile.h.
#pragma once

#include "tile.h"

namespace vlora::atmm::VLORA_ISA {

// out = in + sign * tile in bf16, for panels whose even columns come first. A shift or a mask then
// extracts the even or the odd columns of a line of `in` and `out`, without crossing lanes.
struct AddedDeinterleaved : Added<uint16_t, false> {
  template <int M, int N>
  static inline __attribute__((always_inline)) void end(V (&acc)[M][N], const Tile& t,
                                                        int64_t group) {
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
        uint16_t tail[kPanel] = {};
        const bool is_tail = n == N - 1 && cut;
        if (is_tail)
          for (int i = 0; i < t.tail; ++i) tail[i] = from[i];
        V sum = V::load_deinterleaved(is_tail ? tail : from);
        sum.add_product(sign, acc[m][n]);
        sum.store_interleaved(is_tail ? tail : to);
        if (is_tail)
          for (int i = 0; i < t.tail; ++i) to[i] = tail[i];
      }
    }
  }
};

}  // namespace vlora::atmm::VLORA_ISA

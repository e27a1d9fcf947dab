// Products of int4 weights with rows of x that are quantized to int8, too.
//
// The values of x in a group are unit * integer, as in dynamic.h. A group has dynamic_group(w)
// values, which share a scale and a zero of W:
//
//   y[t, n] = bias[n] + sum over groups of
//             (sum of (value[n] - zero[n, group]) * integer[t]) * unit[t, group] * scale[n, group].
//
// The inner sums are multiples of kZeroStep and exact, in 32 bits and in fp32. The rest is computed
// in fp32 from left to right, the groups in their order, without fused multiply-adds. So a row of y
// has the same bits in every kernel, for any number of threads, and whatever rows are multiplied
// with it.
#pragma once

#include <algorithm>

#include "quantized/dynamic.h"

namespace vlora::quantized {

// Returns the number of values of x in a group: a whole group of W, or a half of one of 128.
inline int64_t dynamic_group(const Weight& w) {
  return std::min(kDynamicGroup, int64_t(1) << w.group_shift);
}

// What a group of a row of x has besides its integers.
struct GroupScale {
  float unit;     // NaN if the group has a value that is not finite
  float negated;  // minus the sum of the integers, which is multiplied by the zero of W
};

// Packed x. A tile has, for each group, the integers of all its rows and then their GroupScale. The
// integers are in the order of the bytes of W: see `packed_place`.
struct Int4Rows {
  char* packed;
  int64_t tiles;   // of rows, which are divided evenly
  int64_t groups;  // of a row
  int64_t group;   // dynamic_group(w)

  int64_t row_bytes() const { return groups * (group + int64_t(sizeof(GroupScale))); }
};

// Returns the place of one of 8 adjacent values among the bytes that they are multiplied with: the
// low bits of the four bytes of W, then the high bits (see `Weight`).
constexpr int packed_place(int value) { return 4 * (value / 2 % 2) + 2 * (value % 2) + value / 4; }

// The kernels of an instruction set.
struct Int4Kernels {
  int64_t tile_rows;  // maximum rows of x in a tile
  // Packs tiles [from, until) of x.
  void (*pack)(const Product&, const Int4Rows&, int64_t from, int64_t until);
  // Multiplies panels [from, to). Rows of W that fill no panel are one more panel.
  void (*run)(const Product&, const Int4Rows&, int64_t from, int64_t to);
};
// Returns null if there are no kernels of their own for the instruction set.
const Int4Kernels* int4_kernels(runtime::Isa isa);

// W is int4 in panels of kDynamicPanel rows.
void multiply_dynamic_int4(const Product& product, int threads);

}  // namespace vlora::quantized

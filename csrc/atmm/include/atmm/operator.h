// The operator's entry points. The caller (bindings_group.cpp, bindings.cpp) checks the problems.
#pragma once

#include "atmm/kernels.h"
#include "atmm/segments.h"
#include "atmm/table.h"

namespace vlora::atmm {

// Chooses the tile of each shape.
class Chooser {
 public:
  virtual ~Chooser() = default;
  virtual TileConfig choose(const Shape& shape) const = 0;
  // Whether a row's products are summed in the same order for any number of rows, so that its
  // result is the same in any batch.
  virtual bool fixed_order() const = 0;
};

// y[rows] += sign * (x[rows] A^T) B^T for all segments and outputs of the problem (§4.3).
void apply(const Kernels& kernels, const Problem& problem, const SegmentList& segments,
           const Chooser& chooser, int threads);

// y[rows, : classes] = x[rows] W^T + bias: problem.pairs hold (classes, packed W, bias), all fp32.
void heads(const Kernels& kernels, const Problem& problem, const SegmentList& segments);

// out = in + sign * B A for all matrices (§4.4.1), or out = in if the rank is 0. `out` may be `in`.
void merge(const Kernels& kernels, Dtype dtype, void* out, const void* in, const Merge* merges,
           int64_t count, float sign, const Chooser& chooser, int threads);

// Packs a matrix [n, k] in panels of kPanel interleaved rows (bf16: pairs of k), padded with zeros.
// `bundle` neighbouring panels are interleaved step by step; the last bundle may have fewer. With
// `narrow` (matrices of the first product), a last panel with at most kPanel / 2 rows takes half
// the memory, because two of its steps are interleaved.
size_t packed_bytes(int64_t n, int64_t k, Dtype dtype, bool narrow);
void pack(void* to, const void* matrix, int64_t n, int64_t k, ptrdiff_t n_stride,
          ptrdiff_t k_stride, Dtype dtype, int bundle, bool narrow);

// Whether the last panel of a matrix of n rows can be narrow.
inline bool has_narrow_panel(int64_t n) { return n % kPanel != 0 && n % kPanel <= kPanel / 2; }

}  // namespace vlora::atmm

// The operator's entry points. Problems are checked by the caller (bindings.cpp).
#pragma once

#include <memory>

#include "atmm/kernels.h"
#include "atmm/segments.h"
#include "atmm/table.h"
#include "runtime/threads.h"

namespace vlora::atmm {

// Says which tile a shape gets.
class Chooser {
 public:
  virtual ~Chooser() = default;
  virtual TileConfig choose(const Shape& shape) const = 0;
  // One chain of sums whatever the number of rows: a row's result is then the same in any batch.
  virtual bool one_order() const = 0;
};

// y[rows] += sign * (x[rows] A^T) B^T for all segments and outputs of the problem (§4.3).
void apply(const Kernels& kernels, const Problem& problem, const SegmentList& segments,
           const Chooser& chooser, int threads);

// The same as a part of another kernel's region: made before the region by its caller, for as many
// threads as it will have or more, then called once by each of its threads. y is ready when all have
// come to the next meeting. The problem, the segments and the kernels outlive it.
class Apply {
 public:
  Apply(const Kernels& kernels, const Problem& problem, const SegmentList& segments,
        const Chooser& chooser, int threads);
  ~Apply();
  void operator()(const runtime::Team& team) const;

  int threads() const { return threads_; }  // that it has work for
  bool meets() const { return meets_; }     // else its threads need nothing of each other

 private:
  struct Wave;
  struct Plan;
  std::unique_ptr<Plan> plan_;
  int threads_ = 1;
  bool meets_ = false;
};

// y[rows, : classes] = x[rows] W^T + bias: problem.pairs hold (classes, W packed, bias), fp32.
void heads(const Kernels& kernels, const Problem& problem, const SegmentList& segments);

// out = in + sign * B A for all matrices (§4.4.1), or = in where the rank is 0; `out` may be `in`.
void merge(const Kernels& kernels, Dtype dtype, void* out, const void* in, const Merge* merges,
           int64_t count, float sign, const Chooser& chooser, int threads);

// A matrix [n, k] in panels of kPanel rows, interleaved (bf16 by pairs of k), the rest zero; and
// `bundle` neighbouring panels interleaved in turn, step by step, fewer in the last bundle. With
// `narrow` (matrices of the first product), a last panel of half the rows or fewer takes half the
// space: two steps are interleaved in it.
size_t packed_bytes(int64_t n, int64_t k, Dtype dtype, bool narrow);
void pack(void* to, const void* matrix, int64_t n, int64_t k, ptrdiff_t n_stride,
          ptrdiff_t k_stride, Dtype dtype, int bundle, bool narrow);

// Whether a matrix of n rows has a narrow last panel, if it may.
inline bool has_narrow(int64_t n) { return n % kPanel != 0 && n % kPanel <= kPanel / 2; }

}  // namespace vlora::atmm

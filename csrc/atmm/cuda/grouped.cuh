// One tile configuration of the grouped product. The mainloop is CUTLASS's multistage one, which
// loads the next tiles to shared memory and registers while a tile is computed (appendix A). The
// epilogue is CUTLASS's as well. The loop over tiles is our own, because in CUTLASS's each block
// would scan the empty problems.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm_grouped.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>
#include <cutlass/half.h>

#include "kernels.cuh"

namespace vlora {

template <typename Element>
struct TypeOf;
template <>
struct TypeOf<cutlass::half_t> {
  static constexpr int kCode = VLORA_FP16;
};
template <>
struct TypeOf<cutlass::bfloat16_t> {
  static constexpr int kCode = VLORA_BF16;
};

// Expand: y += alpha * low B^T in Element. Shrink: partial = x A^T in fp32.
template <typename Element, bool Expand, int BM, int BN, int BK, int WM, int WN, int WK, int Stages>
struct Grouped {
  using Out = std::conditional_t<Expand, Element, float>;
  using Block = cutlass::gemm::GemmShape<BM, BN, BK>;
  using Warp = cutlass::gemm::GemmShape<WM, WN, WK>;
  using Sum = cutlass::epilogue::thread::LinearCombination<Out, 16 / sizeof(Out), float, float>;
  using Parts = typename cutlass::gemm::kernel::DefaultGemmGrouped<
      Element, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, 8,     // A
      Element, cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, 8,  // B
      Out, cutlass::layout::RowMajor, float,                                       // C, sums
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Block, Warp,
      cutlass::gemm::GemmShape<16, 8, 16>, Sum,
      cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, Stages,
      cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>::GemmKernel;
  using Mma = typename Parts::Mma;
  using Epilogue = typename Parts::Epilogue;

  union Shared {
    typename Mma::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
  };

  static constexpr int kThreads = Parts::kThreadCount;
  static constexpr int kShared = int(sizeof(Shared));
  static constexpr float kBeta = Expand ? 1.f : 0.f;
  static Instance instance();
};

template <typename G>
__global__ void __launch_bounds__(G::kThreads) grouped_kernel(Group group, int begin, int end) {
  using Mma = typename G::Mma;
  using Epilogue = typename G::Epilogue;
  using Rows = typename Epilogue::OutputTileIterator;
  VLORA_SHARED(typename G::Shared, shared);
  const int thread = int(threadIdx.x);
  const int warp = cutlass::canonical_warp_idx_sync(), lane = thread % kWarp;
  const int last = group.first[end];
  for (int index = group.first[begin] + int(blockIdx.x); index < last; index += int(gridDim.x)) {
    const Tile t = tile_at(group, begin, end, index);
    const Problem p = group.problems[t.problem];
    using Element = typename Mma::IteratorA::Element;
    auto* const a = const_cast<Element*>(static_cast<const Element*>(p.a)) + t.from;
    auto* const b = const_cast<Element*>(static_cast<const Element*>(p.b)) + t.from;
    auto* const c = static_cast<typename Rows::Element*>(p.c) + t.offset;
    typename Mma::IteratorA rows_of_a(typename Mma::IteratorA::Layout(p.lda), a, {p.m, t.depth},
                                      thread, {t.row, 0});
    typename Mma::IteratorB rows_of_b(typename Mma::IteratorB::Layout(p.ldb), b, {t.depth, p.n},
                                      thread, {0, t.column});
    typename Mma::FragmentC sums;
    sums.clear();
    __syncthreads();  // the previous tile's epilogue no longer uses shared memory
    Mma mma(shared->mainloop, thread, warp, lane);
    mma((t.depth + Mma::Shape::kK - 1) / Mma::Shape::kK, sums, rows_of_a, rows_of_b, sums);

    const typename Rows::Params layout(typename Rows::Layout(p.ldc));
    const cutlass::MatrixCoord size(p.m, p.n), corner(t.row, t.column);
    Rows source(layout, c, size, thread, corner);
    Rows target(layout, c, size, thread, corner);
    typename Epilogue::OutputOp sum({p.alpha, G::kBeta});
    Epilogue epilogue(shared->epilogue, thread, warp, lane);
    epilogue(sum, target, sums, source);
  }
}

template <typename Element, bool Expand, int BM, int BN, int BK, int WM, int WN, int WK, int Stages>
Instance Grouped<Element, Expand, BM, BN, BK, WM, WN, WK, Stages>::instance() {
  return {{{BM, BN, BK}, {WM, WN, WK}, Stages, TypeOf<Element>::kCode, Expand, kThreads, kShared},
          [](int* resident) { return warm(grouped_kernel<Grouped>, kThreads, kShared, resident); },
          [](const Group& group, int begin, int end, int blocks, cudaStream_t stream) {
            return vlora::launch(grouped_kernel<Grouped>, dim3(unsigned(blocks)), kThreads, kShared,
                                 stream, group, begin, end);
          }};
}

}  // namespace vlora

// One tile configuration of the grouped GEMM: CUTLASS's multistage mainloop (appendix A: while one
// tile is computed, the next ones are on their way to shared memory and registers).
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm_grouped.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>
#include <cutlass/half.h>

#include "problems.cuh"

namespace vlora {

using Launch = cudaError_t (*)(const Problems &, cudaStream_t);

struct Instance {
  VloraTile tile;
  Launch launch;
};

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

// Expand: y += low B^T in Element. Shrink: partial = x A^T in fp32.
template <typename Element, bool Expand, int BM, int BN, int BK, int WM, int WN, int WK, int Stages>
struct Grouped {
  using Out = std::conditional_t<Expand, Element, float>;
  using Block = cutlass::gemm::GemmShape<BM, BN, BK>;
  using Warp = cutlass::gemm::GemmShape<WM, WN, WK>;
  using Epilogue =
      cutlass::epilogue::thread::LinearCombination<Out, 16 / sizeof(Out), float, float>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmGrouped<
      Element, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, 8,
      Element, cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, 8,
      Out, cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      Block, Warp, cutlass::gemm::GemmShape<16, 8, 16>, Epilogue,
      cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, Stages,
      cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>::GemmKernel;

  static constexpr int kShared = int(sizeof(typename Kernel::SharedStorage));

  static Instance instance() {
    return {{{BM, BN, BK}, {WM, WN, WK}, Stages, TypeOf<Element>::kCode, Expand,
             Kernel::kThreadCount, kShared}, &launch};
  }

  // Persistent blocks: as many as fit on the device. Asked of the driver once per device.
  static cudaError_t blocks(int *count) {
    constexpr int kDevices = 64;
    static int known[kDevices] = {};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device < kDevices && known[device] > 0) {
      *count = known[device];
      return cudaSuccess;
    }
    error = cudaFuncSetAttribute(cutlass::Kernel<Kernel>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (error != cudaSuccess) return error;
    int per_sm = 0, sms = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, cutlass::Kernel<Kernel>,
                                                          Kernel::kThreadCount, kShared);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    *count = per_sm * sms;
    if (*count == 0) return cudaErrorInvalidConfiguration;
    if (device < kDevices) known[device] = *count;
    return cudaSuccess;
  }

  static cudaError_t launch(const Problems &p, cudaStream_t stream) {
    int count = 0;
    const cudaError_t error = blocks(&count);
    if (error != cudaSuccess) return error;
    const float beta = Expand ? 1.f : 0.f;
    typename Kernel::Arguments arguments(
        p.sizes, p.count, count, {1.f, beta}, reinterpret_cast<Element **>(p.a),
        reinterpret_cast<Element **>(p.b), reinterpret_cast<Out **>(p.c),
        reinterpret_cast<Out **>(p.c), p.lda, p.ldb, p.ldc, p.ldc);
    typename Kernel::Params params(arguments, nullptr, 0);
    cutlass::Kernel<Kernel><<<count, Kernel::kThreadCount, kShared, stream>>>(params);
    return cudaGetLastError();
  }
};

}  // namespace vlora

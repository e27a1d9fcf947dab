// The Python submodule `quantized`. It takes numbers and addresses, which
// vlora/kernels/quantized.py has checked.
#include <pybind11/pybind11.h>

#include "quantized/dynamic_int4.h"
#include "quantized/quantize.h"
#include "quantized/quantized.h"
#include "runtime/kernel_call.h"
#include "steps/recording.h"

namespace py = pybind11;
using namespace vlora;

namespace {

quantized::Product product_of(const quantized::Weight& weight, uintptr_t y, ptrdiff_t y_stride,
                              uintptr_t x, ptrdiff_t x_stride, int64_t rows, uintptr_t bias) {
  return {
      weight,   reinterpret_cast<const float*>(x),   rows, x_stride, reinterpret_cast<float*>(y),
      y_stride, reinterpret_cast<const float*>(bias)};
}

}  // namespace

void bind_quantized(py::module_& m) {
  m.doc() = "Products with matrices of int8 or int4 weights.";
  m.attr("BLOCK") = quantized::kBlock;
  m.attr("MIDDLE") = quantized::kMiddle;
  m.attr("ZERO_STEP") = quantized::kZeroStep;
  m.attr("WHOLE_ROW") = quantized::Weight::kWholeRow;
  m.def("preferred_panel_rows", &quantized::preferred_panel_rows);
  m.def("multiply",
        [](uintptr_t y, ptrdiff_t y_stride, uintptr_t x, ptrdiff_t x_stride, int64_t rows, int bits,
           uintptr_t values, uintptr_t scales, uintptr_t zeros, int64_t n, int64_t k,
           int group_shift, int64_t panel_rows, uintptr_t bias, bool bf16, int threads) {
          const quantized::Weight weight{bits,
                                         reinterpret_cast<const uint8_t*>(values),
                                         reinterpret_cast<const float*>(scales),
                                         reinterpret_cast<const int8_t*>(zeros),
                                         n,
                                         k,
                                         group_shift,
                                         panel_rows};
          const auto product = product_of(weight, y, y_stride, x, x_stride, rows, bias);
          const Dtype dtype = bf16 ? Dtype::kBf16 : Dtype::kFp32;
          steps::perform({threads}, [product, dtype](const steps::Inputs& inputs) {
            quantized::multiply(product, dtype, inputs.threads);
          });
        });
  m.attr("DYNAMIC_GROUP") = quantized::kDynamicGroup;
  m.def("multiplies_bytes", &quantized::multiplies_bytes);
  m.def("multiply_dynamic",
        [](uintptr_t y, ptrdiff_t y_stride, uintptr_t x, ptrdiff_t x_stride, int64_t rows, int bits,
           uintptr_t values, uintptr_t scales, uintptr_t zeros, int64_t n, int64_t k,
           int group_shift, uintptr_t bias, int threads) {
          const quantized::Weight weight{bits,
                                         reinterpret_cast<const uint8_t*>(values),
                                         reinterpret_cast<const float*>(scales),
                                         reinterpret_cast<const int8_t*>(zeros),
                                         n,
                                         k,
                                         group_shift,
                                         quantized::kDynamicPanel};
          const auto product = product_of(weight, y, y_stride, x, x_stride, rows, bias);
          const auto multiply =
              bits == 4 ? quantized::multiply_dynamic_int4 : quantized::multiply_dynamic;
          steps::perform({threads}, [product, multiply](const steps::Inputs& inputs) {
            multiply(product, inputs.threads);
          });
        });
  m.def("multiply_bytes", [](int64_t rounds, int threads) {
    const runtime::KernelCall call;
    return quantized::multiply_bytes(rounds, threads);
  });
  m.def("quantize", [](uintptr_t weights, bool bf16, ptrdiff_t stride, int bits, uintptr_t values,
                       uintptr_t scales, uintptr_t zeros, int64_t n, int64_t k, int group_shift,
                       bool whole_zeros, int threads) {
    const quantized::Quantization quantization{bf16 ? Dtype::kBf16 : Dtype::kFp32,
                                               reinterpret_cast<const void*>(weights),
                                               stride,
                                               bits,
                                               reinterpret_cast<uint8_t*>(values),
                                               reinterpret_cast<float*>(scales),
                                               reinterpret_cast<int8_t*>(zeros),
                                               n,
                                               k,
                                               group_shift,
                                               whole_zeros};
    const runtime::KernelCall call;
    return quantized::quantize(quantization, threads);
  });
  m.def("pack_int4", [](uintptr_t stored, ptrdiff_t stride, int64_t bytes, uintptr_t values,
                        int64_t n, int64_t row_bytes, int threads) {
    const runtime::KernelCall call;
    quantized::pack_int4(reinterpret_cast<const uint8_t*>(stored), stride, bytes,
                         reinterpret_cast<uint8_t*>(values), n, row_bytes, threads);
  });
  m.def("interleave", [](int bits, uintptr_t values, uintptr_t scales, uintptr_t zeros, int64_t n,
                         int64_t row_bytes, int64_t groups, int64_t panel_rows, int threads) {
    const runtime::KernelCall call;
    quantized::interleave(bits, reinterpret_cast<uint8_t*>(values),
                          reinterpret_cast<float*>(scales), reinterpret_cast<int8_t*>(zeros), n,
                          row_bytes, groups, panel_rows, threads);
  });
}

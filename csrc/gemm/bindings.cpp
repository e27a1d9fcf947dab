// The Python submodule `gemm`. It takes numbers and addresses, which vlora/kernels/ops.py checks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "gemm/gemm.h"
#include "runtime/kernel_call.h"
#include "runtime/names.h"
#include "steps/recording.h"

namespace py = pybind11;
using namespace vlora;

namespace {

gemm::Product product_of(uintptr_t y, ptrdiff_t y_stride, uintptr_t x, ptrdiff_t x_stride,
                         int64_t rows, uintptr_t w, bool bf16, int64_t n, int64_t k,
                         uintptr_t bias) {
  return {bf16 ? Dtype::kBf16 : Dtype::kFp32,
          reinterpret_cast<const void*>(w),
          n,
          k,
          reinterpret_cast<const float*>(x),
          rows,
          x_stride,
          reinterpret_cast<float*>(y),
          y_stride,
          reinterpret_cast<const float*>(bias)};
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.doc() = "Products with row-major matrices, and the operations between them.";
  m.def(
      "in_place_tile_rows",
      [](int accumulators, int registers, int64_t l1, int64_t ways, int64_t line, int64_t stride) {
        runtime::Machine machine{};
        machine.l1 = l1, machine.l1_ways = ways, machine.l1_line = line;
        return gemm::in_place_tile_rows(accumulators, registers, gemm::rows_in_l1(machine, stride));
      },
      py::kw_only(), py::arg("accumulators"), py::arg("registers"), py::arg("l1"), py::arg("ways"),
      py::arg("line"), py::arg("stride"));
  m.def("multiply", [](uintptr_t y, ptrdiff_t y_stride, uintptr_t x, ptrdiff_t x_stride,
                       int64_t rows, uintptr_t w, bool bf16, int64_t n, int64_t k, uintptr_t bias,
                       int threads) {
    const gemm::Product product = product_of(y, y_stride, x, x_stride, rows, w, bf16, n, k, bias);
    steps::perform({threads}, [product](const steps::Inputs& inputs) {
      gemm::multiply(gemm::kernels(runtime::vector_isa(product.dtype)),
                     gemm::amx_gemm_for(product.dtype), product, inputs.threads);
    });
  });
  m.def("multiply_gated", [](uintptr_t out, uintptr_t y, ptrdiff_t y_stride, uintptr_t x,
                             ptrdiff_t x_stride, int64_t rows, uintptr_t w, bool bf16, int64_t n,
                             int64_t k, uintptr_t bias, int threads) {
    const gemm::Product product = product_of(y, y_stride, x, x_stride, rows, w, bf16, n, k, bias);
    float* const gated = reinterpret_cast<float*>(out);
    steps::perform({threads}, [product, gated](const steps::Inputs& inputs) {
      gemm::multiply_gated(gemm::kernels(runtime::vector_isa(product.dtype)),
                           gemm::amx_gemm_for(product.dtype), product, gated, inputs.threads);
    });
  });
  m.def("embed", [](uintptr_t out, uintptr_t tokens, uintptr_t replacements, uintptr_t table,
                    bool bf16, int64_t words, int64_t rows, int64_t width, int threads) {
    const gemm::Embedding embedding{bf16 ? Dtype::kBf16 : Dtype::kFp32,
                                    reinterpret_cast<const void*>(table),
                                    reinterpret_cast<const int64_t*>(tokens),
                                    reinterpret_cast<const int64_t*>(replacements),
                                    reinterpret_cast<float*>(out),
                                    rows,
                                    width};
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = embedding.tokens[row];
      if ((token < 0 || token >= words) && !(embedding.replacements && embedding.replacements[row]))
        throw std::out_of_range("token " + std::to_string(token) + " is not in a vocabulary of " +
                                std::to_string(words));
    }
    const runtime::KernelCall call;
    gemm::embed(gemm::kernels(runtime::vector_isa(Dtype::kFp32)), embedding, threads);
  });
  m.def("add_norm", [](uintptr_t out, uintptr_t hidden, uintptr_t delta, uintptr_t weight,
                       int64_t rows, int64_t width, float eps, int threads) {
    const gemm::Norm norm{reinterpret_cast<float*>(hidden),
                          reinterpret_cast<const float*>(delta),
                          reinterpret_cast<const float*>(weight),
                          reinterpret_cast<float*>(out),
                          rows,
                          width,
                          eps};
    steps::perform({threads}, [norm](const steps::Inputs& inputs) {
      gemm::add_norm(gemm::kernels(runtime::vector_isa(Dtype::kFp32)), norm, inputs.threads);
    });
  });
  m.def("head_norm", [](uintptr_t qkv, uintptr_t query_weight, uintptr_t key_weight, int64_t rows,
                        int64_t heads, int64_t kv_heads, int64_t dim, float eps, int threads) {
    const gemm::HeadNorm norm{reinterpret_cast<float*>(qkv),
                              reinterpret_cast<const float*>(query_weight),
                              reinterpret_cast<const float*>(key_weight),
                              rows,
                              heads,
                              kv_heads,
                              dim,
                              eps};
    steps::perform({threads}, [norm](const steps::Inputs& inputs) {
      gemm::head_norm(gemm::kernels(runtime::vector_isa(Dtype::kFp32)), norm, inputs.threads);
    });
  });
  m.def("gate", [](uintptr_t out, uintptr_t x, int64_t rows, int64_t width, int threads) {
    const gemm::Gate gate{reinterpret_cast<const float*>(x), reinterpret_cast<float*>(out), rows,
                          width};
    steps::perform({threads}, [gate](const steps::Inputs& inputs) {
      gemm::gate(gemm::kernels(runtime::vector_isa(Dtype::kFp32)), gate, inputs.threads);
    });
  });
  m.def("argmax", [](uintptr_t index, uintptr_t finite, uintptr_t x, int64_t rows, int64_t width,
                     int threads) {
    const gemm::Argmax argmax{reinterpret_cast<const float*>(x), reinterpret_cast<int64_t*>(index),
                              reinterpret_cast<bool*>(finite), rows, width};
    const runtime::KernelCall call;
    gemm::argmax(gemm::kernels(runtime::vector_isa(Dtype::kFp32)), argmax, threads);
  });
  // The fields of gemm::Draw, in order.
  using DrawFields = std::tuple<int64_t, int64_t, float, float, double, double>;
  m.def("sample",
        [](uintptr_t scores, int64_t width, const std::vector<DrawFields>& draws, int threads) {
          std::vector<gemm::Draw> all;
          for (const auto& [row, top_k, temperature, min_p, top_p, uniform] : draws)
            all.push_back({row, top_k, temperature, min_p, top_p, uniform});
          std::vector<int64_t> tokens(all.size());
          const gemm::Sample sample{reinterpret_cast<const float*>(scores), width, all.data(),
                                    tokens.data(), int64_t(all.size())};
          {
            const runtime::KernelCall call;
            gemm::sample(gemm::kernels(runtime::vector_isa(Dtype::kFp32)), sample, threads);
          }
          return tokens;
        });
}

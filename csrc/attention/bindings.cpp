// The Python submodule `attention`. It takes numbers and addresses, which vlora/model/attention.py
// checks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "runtime/names.h"
#include "steps/recording.h"

namespace py = pybind11;
using namespace vlora;

namespace {

// The fields of attention::Chunk, in order.
using ChunkFields = std::tuple<int64_t, int64_t, int64_t, int64_t>;

std::unique_ptr<attention::Plan> make_plan(const std::string& dtype, int64_t block, int64_t heads,
                                           int64_t kv_heads, int64_t dim, int64_t page,
                                           int64_t page_count,
                                           const std::vector<ChunkFields>& chunks,
                                           std::vector<int32_t> pages, int threads,
                                           bool fixed_order) {
  const attention::Layout layout{dtype_of(dtype), block, kv_heads, dim, page, page_count};
  std::vector<attention::Chunk> all;
  for (const auto& [row, length, start, first_page] : chunks)
    all.push_back({row, length, start, first_page});
  return std::make_unique<attention::Plan>(layout, heads, std::move(all), std::move(pages), threads,
                                           fixed_order);
}

}  // namespace

void bind_attention(py::module_& m) {
  m.doc() = "Attention over paged keys and values.";
  py::class_<attention::Plan>(m, "Plan")
      .def(py::init(&make_plan))
      .def("attend", [](const attention::Plan& plan, uintptr_t cache, uintptr_t y, uintptr_t qkv,
                        uintptr_t cosines, uintptr_t sines, float scale, int threads) {
        const steps::Inputs own{threads, &plan, reinterpret_cast<const float*>(cosines),
                                reinterpret_cast<const float*>(sines)};
        steps::perform(own, [cache, y, qkv, scale](const steps::Inputs& inputs) {
          const attention::Plan& plan = *inputs.plan;
          const int64_t dim = plan.layout.dim;
          const attention::Problem problem{&plan,
                                           reinterpret_cast<char*>(cache),
                                           reinterpret_cast<const float*>(qkv),
                                           (plan.heads + 2 * plan.layout.kv_heads) * dim,
                                           reinterpret_cast<float*>(y),
                                           plan.heads * dim,
                                           inputs.cosines,
                                           inputs.sines,
                                           scale};
          attention::attend(attention::kernels_of(plan), problem, inputs.threads);
        });
      });
}

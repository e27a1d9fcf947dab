// Python bindings of the operator: the module and the merge. bindings_group.cpp binds groups of
// projections, and bindings_tiles.cpp the choice of tiles.
//
// The bindings check their arguments. They take numbers and addresses instead of tensors, so their
// build does not need torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "atmm/bindings_group.h"
#include "atmm/bindings_tiles.h"
#include "atmm/operator.h"
#include "runtime/kernel_call.h"
#include "runtime/names.h"

namespace py = pybind11;
using namespace vlora;
using namespace vlora::atmm;

namespace {

// (offset, d_out, d_in, rank, address of A, address of B)
using Update = std::tuple<int64_t, int64_t, int64_t, int64_t, uintptr_t, uintptr_t>;

// The matrices that one adapter's merge changes, and the ranges (offset, count) of elements that it
// copies unchanged.
struct MergeList {
  std::vector<Merge> merges;

  MergeList(const std::vector<Update>& updates,
            const std::vector<std::pair<int64_t, int64_t>>& copies) {
    for (const auto& [offset, d_out, d_in, rank, a, b] : updates)
      merges.push_back({offset, d_out, d_in, rank, reinterpret_cast<const float*>(a),
                        reinterpret_cast<const float*>(b)});
    for (const auto& [offset, count] : copies)
      merges.push_back({offset, 1, count, 0, nullptr, nullptr});
  }
};

void merge_all(uintptr_t out, uintptr_t in, const std::string& dtype_name, const MergeList& list,
               int sign, int64_t config, int threads) {
  if (sign != 1 && sign != -1)
    throw std::invalid_argument("sign " + std::to_string(sign) + " is neither +1 nor -1");
  const Dtype dtype = dtype_of(dtype_name);
  const TileChooser chooser(Operation::kMerge, config);
  const runtime::KernelCall call;
  vlora::atmm::merge(current_kernels(dtype), dtype, reinterpret_cast<void*>(out),
                     reinterpret_cast<const void*>(in), list.merges.data(),
                     int64_t(list.merges.size()), float(sign), chooser, threads);
}

}  // namespace

void bind_atmm(py::module_& m) {
  m.doc() = "ATMM on the CPU; vlora.atmm is its interface.";
  bind_group(m);
  bind_tiles(m);
  py::class_<MergeList>(m, "Merges")
      .def(py::init<const std::vector<Update>&, const std::vector<std::pair<int64_t, int64_t>>&>());
  m.def("merge", &merge_all);
}

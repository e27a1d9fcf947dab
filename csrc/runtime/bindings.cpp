// What all kernels share, as Python sees it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/dispatch.h"
#include "runtime/large_pages.h"
#include "runtime/machine.h"
#include "runtime/names.h"
#include "runtime/threads.h"

namespace py = pybind11;
using namespace vlora;

namespace {

constexpr const char* kSources[] = {"auto", "own", "openmp"};

// How often the threads of a region began, and met: for tests of the team itself.
int64_t meet(int threads, int rounds, int failing) {
  std::atomic<int64_t> met{0};
  auto work = [&](const runtime::Team& team) {
    for (int i = 0; i < rounds; ++i) {
      if (team.thread == failing) throw std::runtime_error("thread " + std::to_string(failing));
      met.fetch_add(1);
      team.wait();
      if (met.load() < int64_t(i + 1) * team.threads) throw std::logic_error("met too early");
    }
  };
  py::gil_scoped_release released;
  runtime::run_on(threads, work);
  return met;
}

// Sum of the numbers below `pieces`, each added by whoever takes it.
int64_t add_pieces(int threads, int64_t pieces) {
  std::atomic<int64_t> sum{0};
  py::gil_scoped_release released;
  runtime::share_out(threads, pieces, [&](int64_t piece) { sum.fetch_add(piece); });
  return sum;
}

}  // namespace

void bind_runtime(py::module_& m) {
  m.doc() = "Dispatch, threads and microbenchmarks that all kernels share.";
  m.def("isas", [](const std::string& dtype) {
    std::vector<std::string> names;
    for (const runtime::Isa isa : runtime::ranked(dtype_of(dtype))) names.push_back(runtime::name_of(isa));
    return names;
  }, py::arg("dtype") = "fp32");
  m.def("isa", [](const std::string& dtype) {
    return std::string(runtime::name_of(runtime::isa(dtype_of(dtype))));
  }, py::arg("dtype") = "fp32");
  m.def("core_peak", [](const std::string& isa, const std::string& dtype) {
    for (const runtime::Isa one : runtime::ranked(dtype_of(dtype)))
      if (isa == runtime::name_of(one)) return runtime::core_peak(one, dtype_of(dtype));
    throw std::invalid_argument("instruction set '" + isa + "' does not run here");
  });
  m.def("chosen_isa", [] { return std::string(runtime::chosen_isa()); });
  m.def("set_isa", [](const std::string& name) { runtime::use_isa(name.c_str()); });
  m.def("large_pages", [] {
    const runtime::LargePages now = runtime::large_pages();
    return std::make_pair(now.regions, now.pieces);
  });
  m.def("machine", [] {
    const runtime::Machine& machine = runtime::machine();
    py::dict found;
    found["l1"] = machine.l1;
    found["l2"] = machine.l2;
    found["l3"] = machine.l3;
    found["memory"] = machine.memory;
    return found;
  });
  m.def("threads", [] { return std::string(kSources[int(runtime::threads_in_use())]); });
  m.def("use_threads", [](const std::string& name) {
    for (int i = 0; i < 3; ++i)
      if (name == kSources[i]) return runtime::use_threads(runtime::Source(i));
    throw std::invalid_argument("threads '" + name + "' are neither auto, own nor openmp");
  });
  m.def("meet", &meet);
  m.def("add_pieces", &add_pieces);
  m.def("peak", [](const std::string& dtype, double seconds, int threads) {
    const Dtype type = dtype_of(dtype);
    py::gil_scoped_release released;
    return runtime::peak(type, seconds, threads);
  });
  m.def("bandwidth", [](int64_t bytes, double seconds, int threads) {
    py::gil_scoped_release released;
    return runtime::bandwidth(bytes, seconds, threads);
  });
  m.def("read", [](uintptr_t address, int64_t bytes, int threads) {
    py::gil_scoped_release released;
    return runtime::read(reinterpret_cast<const void*>(address), bytes, threads);
  });
  m.def("multiply", [](const std::string& dtype, int64_t rounds, int threads) {
    const Dtype type = dtype_of(dtype);
    py::gil_scoped_release released;
    return runtime::multiply(type, rounds, threads);
  });
}

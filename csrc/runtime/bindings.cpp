// The Python submodule `runtime`: instruction sets, microbenchmarks, machine, threads.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/dispatch.h"
#include "runtime/kernel_call.h"
#include "runtime/large_pages.h"
#include "runtime/machine.h"
#include "runtime/names.h"
#include "runtime/threads.h"

namespace py = pybind11;
using namespace vlora;

namespace {

// Names of the thread sources, by the number of the ThreadSource.
constexpr const char* kThreadSources[] = {"auto", "own", "openmp"};

// Runs a region in which all threads wait at `rounds` barriers, except that thread `failing`
// throws. Returns how many times threads arrived at a barrier. For tests of the team.
int64_t count_barriers(int threads, int rounds, int failing) {
  std::atomic<int64_t> arrivals{0};
  auto work = [&](const runtime::Team& team) {
    for (int i = 0; i < rounds; ++i) {
      if (team.thread == failing) throw std::runtime_error("thread " + std::to_string(failing));
      arrivals.fetch_add(1);
      team.wait();
      if (arrivals.load() < int64_t(i + 1) * team.threads)
        throw std::logic_error("a thread passed the barrier early");
    }
  };
  const runtime::KernelCall call;
  runtime::run_on(threads, work);
  return arrivals;
}

// Returns the sum of the numbers below `pieces`. Each thread adds the numbers that it takes. For
// tests of the team.
int64_t sum_pieces(int threads, int64_t pieces) {
  std::atomic<int64_t> sum{0};
  const runtime::KernelCall call;
  runtime::share_out(threads, pieces, [&](int64_t piece) { sum.fetch_add(piece); });
  return sum;
}

py::dict as_dict(const runtime::Machine& machine) {
  py::dict values;
  values["l1"] = machine.l1;
  values["l1_ways"] = machine.l1_ways;
  values["l1_line"] = machine.l1_line;
  values["l2"] = machine.l2;
  values["l3"] = machine.l3;
  values["memory"] = machine.memory;
  return values;
}

}  // namespace

void bind_runtime(py::module_& m) {
  m.doc() = "Instruction sets, threads and microbenchmarks that all kernels share.";
  m.def(
      "isas",
      [](const std::string& dtype) {
        std::vector<std::string> names;
        for (const runtime::Isa isa : runtime::ranked(dtype_of(dtype)))
          names.push_back(runtime::name_of(isa));
        return names;
      },
      py::arg("dtype") = "fp32");
  m.def(
      "isa",
      [](const std::string& dtype) {
        return std::string(runtime::name_of(runtime::isa(dtype_of(dtype))));
      },
      py::arg("dtype") = "fp32");
  m.def("core_peak", [](const std::string& name, const std::string& dtype) {
    for (const runtime::Isa isa : runtime::ranked(dtype_of(dtype)))
      if (name == runtime::name_of(isa)) return runtime::core_peak(isa, dtype_of(dtype));
    throw std::invalid_argument("instruction set '" + name + "' does not run here");
  });
  m.def("requested_isa", &runtime::requested_isa);
  m.def("request_isa", &runtime::request_isa);
  m.def("large_pages", [] {
    const runtime::LargePages sizes = runtime::large_pages();
    return std::make_pair(sizes.regions, sizes.allocated);
  });
  m.def("machine", [] { return as_dict(runtime::machine()); });
  m.def("caches_of", [](const char* folder) { return as_dict(runtime::caches_of(folder)); });
  m.def("thread_source", [] { return std::string(kThreadSources[int(runtime::thread_source())]); });
  m.def("set_thread_source", [](const std::string& name) {
    for (int i = 0; i < 3; ++i)
      if (name == kThreadSources[i]) return runtime::set_thread_source(runtime::ThreadSource(i));
    throw std::invalid_argument("unknown thread source '" + name +
                                "': it must be auto, own or openmp");
  });
  m.def("count_barriers", &count_barriers);
  m.def("sum_pieces", &sum_pieces);
  m.def("peak", [](const std::string& dtype, double seconds, int threads) {
    const Dtype type = dtype_of(dtype);
    const runtime::KernelCall call;
    return runtime::peak(type, seconds, threads);
  });
  m.def("bandwidth", [](int64_t bytes, double seconds, int threads) {
    const runtime::KernelCall call;
    return runtime::bandwidth(bytes, seconds, threads);
  });
  m.def("read", [](uintptr_t address, int64_t bytes, int threads) {
    const runtime::KernelCall call;
    return runtime::read(reinterpret_cast<const void*>(address), bytes, threads);
  });
  m.def("multiply", [](const std::string& dtype, int64_t rounds, int threads) {
    const Dtype type = dtype_of(dtype);
    const runtime::KernelCall call;
    return runtime::multiply(type, rounds, threads);
  });
}

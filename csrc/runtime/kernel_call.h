// A call of kernels from Python. Included by the bindings only.
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/kernel_scope.h"

namespace vlora::runtime {

// It holds no interpreter lock, and its thread is in a KernelScope.
struct KernelCall {
  pybind11::gil_scoped_release released;
  KernelScope scope;
};

}  // namespace vlora::runtime

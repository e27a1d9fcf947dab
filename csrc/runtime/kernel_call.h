// A call of kernels from Python. Only bindings include this file.
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/kernel_scope.h"

namespace vlora::runtime {

// While it exists, the interpreter lock is released and its thread is in a KernelScope.
struct KernelCall {
  pybind11::gil_scoped_release released;
  KernelScope scope;
};

}  // namespace vlora::runtime

// A call of kernels from Python. Only bindings include this file.
#pragma once

#include <pybind11/pybind11.h>

#include "runtime/kernel_scope.h"

namespace vlora::runtime {

// Scope of a call: while the object exists, the interpreter's lock is released and the thread is in
// a KernelScope.
struct KernelCall {
  pybind11::gil_scoped_release released;
  KernelScope scope;
};

}  // namespace vlora::runtime

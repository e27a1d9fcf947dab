// Python bindings of projection groups: packed adapters and the calls that go through them.
#pragma once

#include <pybind11/pybind11.h>

namespace vlora::atmm {

void bind_group(pybind11::module_& m);

}  // namespace vlora::atmm

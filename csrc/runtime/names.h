// Names of data types in Python.
#pragma once

#include <stdexcept>
#include <string>

#include "runtime/types.h"

namespace vlora {

// Throws std::invalid_argument for an unknown name.
inline Dtype dtype_of(const std::string& name) {
  if (name == "fp32") return Dtype::kFp32;
  if (name == "bf16") return Dtype::kBf16;
  throw std::invalid_argument("unknown dtype '" + name + "': it must be fp32 or bf16");
}

}  // namespace vlora

// The names under which Python speaks of types.
#pragma once

#include <stdexcept>
#include <string>

#include "runtime/types.h"

namespace vlora {

inline Dtype dtype_of(const std::string& name) {
  if (name == "fp32") return Dtype::kFp32;
  if (name == "bf16") return Dtype::kBf16;
  throw std::invalid_argument("dtype '" + name + "' is neither fp32 nor bf16");
}

}  // namespace vlora

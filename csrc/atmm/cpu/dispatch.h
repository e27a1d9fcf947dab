#pragma once

#include "atmm/kernels.h"

namespace vlora::atmm {

constexpr int kIsas = 4;
// Fills one table per instruction set that runs here, best first; the others' names stay null
// (generated).
void fill(Kernels* kernels, bool (*runs)(const char* name));

}  // namespace vlora::atmm

#pragma once

#include "atmm/kernels.h"

namespace vlora::atmm {

constexpr int kIsas = 4;
// Fills one table per instruction set, best first (generated).
void fill_all(Kernels* kernels);

}  // namespace vlora::atmm

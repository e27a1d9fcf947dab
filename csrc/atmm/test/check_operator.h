// Checks of the operator on one random problem each. They end the process at the first wrong
// result.
#pragma once

#include "atmm/kernels.h"

// large: whether there is enough work for several threads, in few rows. rows_dtype: type of x and
// y.
void check_apply(const vlora::atmm::Kernels& kernels, vlora::Dtype dtype, vlora::Dtype rows_dtype,
                 bool large);
void check_heads(const vlora::atmm::Kernels& kernels);
void check_merge(const vlora::atmm::Kernels& kernels, vlora::Dtype dtype);
// Multiplies rows with a given stride by packed panels of any bundle. Needs kernels.tiles.
void check_tiles(const vlora::atmm::Kernels& kernels);

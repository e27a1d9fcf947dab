// Checks of the operator, each on one random problem. They end the process at the first wrong
// result.
#pragma once

#include "atmm/kernels.h"

// large: enough work for several threads, with few rows. rows_dtype: type of x and y.
void check_apply(const vlora::atmm::Kernels& kernels, vlora::Dtype dtype, vlora::Dtype rows_dtype,
                 bool large);
void check_heads(const vlora::atmm::Kernels& kernels);
void check_merge(const vlora::atmm::Kernels& kernels, vlora::Dtype dtype);
// Multiplies packed panels of any bundle by rows a stride apart. Needs kernels.tiles.
void check_tiles(const vlora::atmm::Kernels& kernels);

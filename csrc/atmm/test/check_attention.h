// Checks of attention, matrix products and the elementwise kernels, each on one random case.
#pragma once

#include "runtime/dispatch.h"

void check_attention(vlora::runtime::Isa isa);
void check_product(vlora::runtime::Isa isa);
void check_elementwise(vlora::runtime::Isa isa);

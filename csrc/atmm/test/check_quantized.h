// Checks of products with quantized weights and of quantization, each on one random case.
#pragma once

#include "runtime/dispatch.h"

void check_quantized(vlora::runtime::Isa isa);
void check_quantize(vlora::runtime::Isa isa);

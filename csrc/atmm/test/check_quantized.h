// Checks of products with quantized weights and of quantization, each on one random case.
#pragma once

#include "quantized/quantized.h"
#include "runtime/dispatch.h"

// Returns the integer (n, k) of a matrix in panels.
int value_in_panels(const vlora::quantized::Weight& w, int64_t n, int64_t k);

void check_quantized(vlora::runtime::Isa isa);
void check_quantize(vlora::runtime::Isa isa);

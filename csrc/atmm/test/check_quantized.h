// Checks of products with quantized weights, each on one random case.
#pragma once

#include "runtime/dispatch.h"

void check_quantized(vlora::runtime::Isa isa);

// The checks of attention, of products, and of what lies between them: each one random case.
#pragma once

#include "runtime/dispatch.h"

void check_attention(vlora::runtime::Isa isa);
void check_product(vlora::runtime::Isa isa);
void check_between(vlora::runtime::Isa isa);

// The checks of attention, of products, and of what lies between them: each one random case.
#pragma once

#include "cpu/dispatch.h"

void check_attention(vlora::cpu::Isa isa);
void check_product(vlora::cpu::Isa isa);
void check_between(vlora::cpu::Isa isa);

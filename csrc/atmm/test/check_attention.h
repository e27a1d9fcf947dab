// The checks of attention, and of what lies between products: each one random case.
#pragma once

#include "cpu/dispatch.h"

void check_attention(vlora::cpu::Isa isa);
void check_between(vlora::cpu::Isa isa);

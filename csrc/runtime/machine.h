// What the machine has: caches as the system tells them, rates as a millisecond measures them, once.
#pragma once

#include "runtime/types.h"

namespace vlora::runtime {

struct Machine {
  int64_t l1, l2, l3;   // bytes of data; l3: of all cores that share it, of which one has a part
  double peak[kDtypes];  // flop/s of one core, by the instruction sets in use when it is first asked
  double memory;         // bytes/s that one core reads from memory
};

const Machine& machine();

// Of cpu0, from the folder that the system keeps at /sys/devices/system/cpu/cpu0/cache; what it does
// not say is a common size. Rates are zero.
Machine caches_of(const char* folder);

}  // namespace vlora::runtime

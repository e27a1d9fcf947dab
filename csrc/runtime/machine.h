// Cache sizes and speeds of this machine. The operating system gives the sizes. The speeds are
// measured once, in about a millisecond.
#pragma once

#include "runtime/types.h"

namespace vlora::runtime {

struct Machine {
  int64_t l1, l2, l3;    // bytes of data cache; l3 is shared by several cores
  double peak[kDtypes];  // flop/s of one core, with the instruction sets in use at the first call
  double memory;         // bytes/s that one core reads from memory
  int64_t l1_ways = 8;   // lines of the L1 that share a set
  int64_t l1_line = 64;  // bytes
};

const Machine& machine();

// Returns the caches of cpu0 that `folder` describes. Outside tests it is
// /sys/devices/system/cpu/cpu0/cache. Sizes that are missing there get common values. Speeds are
// zero.
Machine caches_of(const char* folder);

}  // namespace vlora::runtime

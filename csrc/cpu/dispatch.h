// Which instruction sets this CPU can run, and which one serves.
#pragma once

#include "cpu/types.h"

namespace vlora::cpu {

enum class Isa : int { kScalar, kAvx2, kAvx512, kAvx512Bf16 };
constexpr int kIsas = 4;

const char* name_of(Isa isa);
bool runs_here(Isa isa);

// The one that all kernels use: the best that this CPU runs, unless another was chosen.
Isa isa();
// Throws std::invalid_argument for a name that is unknown, or that this CPU cannot run.
void use_isa(const char* name);

// What an instruction set provides to the microbenchmarks.
struct Micro {
  double (*peak)(Dtype, int64_t rounds);  // a register-only loop; flops done
  float (*read)(const float* values, int64_t count);
};
const Micro& micro(Isa isa);

// The rate at which `threads` do a register-only loop of the current instruction set's best
// multiply-adds, flop/s, and read a working set that they share out, bytes/s.
double peak(Dtype dtype, double seconds, int threads);
double bandwidth(int64_t bytes, double seconds, int threads);
// One go of each: flops done; reads `bytes` once.
double multiply(Dtype dtype, int64_t rounds, int threads);
float read(const void* values, int64_t bytes, int threads);

}  // namespace vlora::cpu

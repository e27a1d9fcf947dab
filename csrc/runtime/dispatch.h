// Which instruction sets this CPU can run, and which one serves.
#pragma once

#include <vector>

#include "runtime/types.h"

namespace vlora::runtime {

// kAmx: AVX-512's vectors with products of bf16 pairs, and a unit that multiplies tiles of them. kTwin:
// the same in plain C++, for tests where there is no such unit; it is never chosen by itself.
enum class Isa : int { kTwin, kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };
constexpr int kIsas = 6;

const char* name_of(Isa isa);
// Whether this CPU has it and the system lets this process use it (AMX's state is asked for here).
bool runs_here(Isa isa);

// Those that run here but the twin, the fastest for products of this type first: by a peak measured
// once. An instruction set below is preferred only where it is faster by a tenth.
const std::vector<Isa>& ranked(Dtype dtype);

// The one that products with matrices of this type use: the first of `ranked`, unless another was
// chosen, here or by the environment (VLORA_ISA=name).
Isa isa(Dtype dtype);
// The same for kernels of vectors alone, which have nothing for a unit that multiplies tiles.
Isa vector_isa(Dtype dtype);
// For both types; "auto": back to what the peaks say. Throws std::invalid_argument for a name that is
// unknown, or that this CPU cannot run.
void use_isa(const char* name);
// As it was given to `use_isa`.
const char* chosen_isa();

// What an instruction set provides to the microbenchmarks.
struct Micro {
  double (*peak)(Dtype, int64_t rounds);  // a register-only loop of its products; flops done
  float (*read)(const float* values, int64_t count);
};
const Micro& micro(Isa isa);

// flop/s of one core by an instruction set's own way to multiply this type, measured once in a
// millisecond.
double core_peak(Isa isa, Dtype dtype);

// The rate at which `threads` do a register-only loop, flop/s, and read a working set that they share
// out, bytes/s. The loop is the fastest way that the instruction set in use has for the type: where
// products of bf16 pairs are slower than widening, fp32's.
double peak(Dtype dtype, double seconds, int threads);
double bandwidth(int64_t bytes, double seconds, int threads);
// One go of each: flops done; reads `bytes` once.
double multiply(Dtype dtype, int64_t rounds, int threads);
float read(const void* values, int64_t bytes, int threads);

}  // namespace vlora::runtime

// The instruction sets that this CPU can run, and the one that kernels use.
#pragma once

#include <string>
#include <vector>

#include "runtime/types.h"

namespace vlora::runtime {

// In order of capability. kAvx512Bf16 multiplies bf16 pairs and bytes (VNNI). kAmx has AVX-512
// vectors, the same products, and a unit that multiplies tiles of pairs or bytes. kTwin emulates
// kAmx in plain C++ for tests on CPUs without AMX. It is used only on request.
enum class Isa : int { kTwin, kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };
constexpr int kIsas = 6;

const char* name_of(Isa isa);
// Returns whether the CPU has the instruction set and the system lets this process use it. For AMX
// it asks the system for permission.
bool runs_here(Isa isa);

// Returns the instruction sets that run here, without the twin. They are ordered by their measured
// peak for products of this type, fastest first. A less capable set precedes a more capable one
// only if it is 10 % faster.
const std::vector<Isa>& ranked(Dtype dtype);

// Returns the instruction set for products with matrices of this type: the requested one, or else
// the first of `ranked`. The environment variable VLORA_ISA counts as a request made when this
// library was loaded.
Isa isa(Dtype dtype);
// Returns the instruction set for kernels that use vectors only and have no code for tiles.
Isa vector_isa(Dtype dtype);
// Requests an instruction set for both types, or one for fp32 and another for bf16: "avx512,avx2".
// "auto" returns to the ranking. Throws std::invalid_argument for a name that is unknown or that
// this CPU cannot run.
void request_isa(const std::string& names);
std::string requested_isa();

// The microbenchmarks of an instruction set.
struct Microbenchmarks {
  // Runs `rounds` iterations of a loop of products that stays in registers; returns the flops done.
  double (*peak)(Dtype, int64_t rounds);
  // Reads the values once; returns their sum.
  float (*read)(const float* values, int64_t count);
};
const Microbenchmarks& microbenchmarks(Isa isa);

// Returns the flop/s of one core for an instruction set's products of this type. It is measured
// once, in a millisecond.
double core_peak(Isa isa, Dtype dtype);

// Returns the flop/s that `threads` threads reach together in a loop on registers. The loop
// is the fastest that the instruction set in use has for the type. If products of bf16 pairs are
// slower than widening to fp32, that is the loop of fp32.
double peak(Dtype dtype, double seconds, int threads);
// Returns the bytes/s at which `threads` threads together read a working set of `bytes`, each its
// own part.
double bandwidth(int64_t bytes, double seconds, int threads);
// `multiply` runs the loop of `peak` once and returns its flops; `read` reads `bytes` of fp32 once.
double multiply(Dtype dtype, int64_t rounds, int threads);
float read(const void* values, int64_t bytes, int threads);

}  // namespace vlora::runtime

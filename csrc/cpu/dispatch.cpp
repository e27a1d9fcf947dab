#include "cpu/dispatch.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace vlora::cpu {
namespace {

Isa best() {
  for (int i = kIsas - 1; i > 0; --i)
    if (runs_here(Isa(i))) return Isa(i);
  return Isa::kScalar;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  static const char* const names[kIsas] = {"scalar", "avx2", "avx512", "avx512_bf16"};
  return names[int(isa)];
}

bool runs_here(Isa isa) {
  __builtin_cpu_init();
  // These also ask the operating system whether it saves the registers (xgetbv).
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
  }
  return false;
}

Isa isa() { return current(); }

void use_isa(const char* name) {
  for (int i = 0; i < kIsas; ++i)
    if (!std::strcmp(name, name_of(Isa(i))) && runs_here(Isa(i))) {
      current() = Isa(i);
      return;
    }
  throw std::invalid_argument("instruction set '" + std::string(name) +
                              "' was not built or this CPU lacks it");
}

}  // namespace vlora::cpu

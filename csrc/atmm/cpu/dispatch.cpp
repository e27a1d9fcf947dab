// Which of the compiled instruction sets this CPU can run, by cpuid.
#include "dispatch.h"

#include <cstring>

namespace vlora::atmm {
namespace {

bool runs_here(const char* name) {
  if (!std::strcmp(name, "scalar")) return true;
  // These also ask the operating system whether it saves the registers (xgetbv).
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!std::strcmp(name, "avx2")) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(name, "avx512")) return avx512;
  return avx512 && __builtin_cpu_supports("avx512bf16");
}

struct Here {
  Kernels all[kIsas] = {};
  const Kernels* usable[kIsas];
  int count = 0;

  Here() {
    __builtin_cpu_init();
    fill(all, runs_here);
    for (const Kernels& kernels : all)
      if (kernels.name) usable[count++] = &kernels;
  }
};

}  // namespace

const Kernels* const* kernels_here(int* count) {
  static const Here here;
  *count = here.count;
  return here.usable;
}

}  // namespace vlora::atmm

#include "runtime/dispatch.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace vlora::runtime {
namespace {

constexpr double kWorthLess = 1.1;
// How much faster an instruction set below has to be: a millisecond's measurement errs by less.
constexpr int kAuto = -1;

// AMX's tiles are 8 KiB that the system keeps for a process which has asked (Linux 5.16).
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((d & kBf16) == 0 || (d & kTile) == 0) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// "auto", or an instruction set.
int parsed(const std::string& name) {
  if (name == "auto") return kAuto;
  for (int i = 0; i < kIsas; ++i)
    if (name == name_of(Isa(i)) && runs_here(Isa(i))) return i;
  throw std::invalid_argument("instruction set '" + name + "' was not built or this CPU lacks it");
}

std::atomic<int>& chosen() {
  static std::atomic<int> choice{[] {
    const char* const asked = std::getenv("VLORA_ISA");
    return asked && *asked ? parsed(asked) : kAuto;
  }()};
  return choice;
}

double measured(Isa isa, Dtype dtype) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const Micro& of = micro(isa);
  // Ten pieces of about a tenth of a millisecond, the best counts: a neighbour takes a core for longer.
  int64_t rounds = 500;
  double best = 0;
  of.peak(dtype, rounds);  // the units wake up
  for (int piece = 0; piece < 10; ++piece) {
    const auto start = Clock::now();
    const double flops = of.peak(dtype, rounds), seconds = since(start);
    best = std::max(best, flops / seconds);
    if (seconds < 5e-5) rounds *= 2;
  }
  return best;
}

bool is_vector(Isa isa) { return isa != Isa::kAmx && isa != Isa::kTwin; }

}  // namespace

const char* name_of(Isa isa) {
  static const char* const names[kIsas] = {"twin", "scalar", "avx2", "avx512", "avx512_bf16", "amx"};
  return names[int(isa)];
}

bool runs_here(Isa isa) {
  __builtin_cpu_init();
  // These also ask the operating system whether it saves the registers (xgetbv).
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  static const bool amx = has_amx();
  switch (isa) {
    case Isa::kTwin:
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
    case Isa::kAmx:
      return avx512 && __builtin_cpu_supports("avx512bf16") && amx;
  }
  return false;
}

double core_peak(Isa isa, Dtype dtype) {
  static std::atomic<double> known[kIsas][kDtypes] = {};
  std::atomic<double>& found = known[int(isa)][int(dtype)];
  if (found == 0) found = measured(isa, dtype);
  return found;
}

const std::vector<Isa>& ranked(Dtype dtype) {
  const auto order = [](Dtype type) {
    std::vector<Isa> found;
    for (int i = int(Isa::kScalar); i < kIsas; ++i) {
      const Isa next = Isa(i);
      if (!runs_here(next)) continue;
      // Before all that are not faster by a tenth; nothing is slower than plain C++.
      auto at = found.begin();
      while (at != found.end() && *at != Isa::kScalar &&
             core_peak(*at, type) > kWorthLess * core_peak(next, type))
        ++at;
      found.insert(at, next);
    }
    return found;
  };
  static const std::vector<Isa> of[kDtypes] = {order(Dtype::kFp32), order(Dtype::kBf16)};
  return of[int(dtype)];
}

Isa isa(Dtype dtype) {
  const int choice = chosen().load(std::memory_order_relaxed);
  return choice == kAuto ? ranked(dtype).front() : Isa(choice);
}

Isa vector_isa(Dtype dtype) {
  const int choice = chosen().load(std::memory_order_relaxed);
  if (choice == int(Isa::kTwin)) return Isa::kScalar;
  if (choice == int(Isa::kAmx)) return Isa::kAvx512Bf16;
  if (choice != kAuto) return Isa(choice);
  const auto& all = ranked(dtype);
  return *std::find_if(all.begin(), all.end(), is_vector);
}

void use_isa(const char* name) { chosen() = parsed(name); }

const char* chosen_isa() {
  const int choice = chosen();
  return choice == kAuto ? "auto" : name_of(Isa(choice));
}

}  // namespace vlora::runtime

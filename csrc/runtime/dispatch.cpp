#include "runtime/dispatch.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "runtime/kernel_scope.h"

namespace vlora::runtime {
namespace {

// Minimum ratio of the peaks at which a less capable instruction set is preferred. The error of a
// measurement of one millisecond is smaller.
constexpr double kRequiredSpeedup = 1.1;
constexpr int kAuto = -1;

// The tile registers are 8 KiB of state. Linux (5.16 and later) saves them only for a process that
// has asked for them.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
  if ((d & kNeeded) != kNeeded) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Returns kAuto or the number of an instruction set.
int parsed(const std::string& name) {
  if (name == "auto") return kAuto;
  for (int i = 0; i < kIsas; ++i)
    if (name == name_of(Isa(i)) && runs_here(Isa(i))) return i;
  throw std::invalid_argument("instruction set '" + name + "' was not built or this CPU lacks it");
}

// VLORA_ISA at the time when this library was loaded, because Python may change its environment
// while kernels run. It is never deleted, since threads may use it during exit.
const std::string& environment_request = *new std::string([] {
  const char* const name = std::getenv("VLORA_ISA");
  return name && *name ? name : "auto";
}());

using Request = std::array<int, kDtypes>;

// Accepts one name for both types, or two names, of fp32 and bf16, with a comma between them.
Request parsed_request(const std::string& names) {
  const size_t comma = names.find(',');
  if (comma == std::string::npos) return {parsed(names), parsed(names)};
  return {parsed(names.substr(0, comma)), parsed(names.substr(comma + 1))};
}

std::array<std::atomic<int>, kDtypes>& requested() {
  static const Request request = parsed_request(environment_request);
  static std::array<std::atomic<int>, kDtypes> requests{{{request[0]}, {request[1]}}};
  return requests;
}

std::string name_of_request(int request) {
  return request == kAuto ? "auto" : name_of(Isa(request));
}

double measured_peak(Isa isa, Dtype dtype) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const Microbenchmarks& benchmarks = microbenchmarks(isa);
  const KernelScope scope;
  // Take the best of ten runs of about 0.1 ms. Another process that takes the core keeps it for
  // longer than one run.
  int64_t rounds = 500;
  double best = 0;
  benchmarks.peak(dtype, rounds);  // this powers up the execution units
  for (int run = 0; run < 10; ++run) {
    const auto start = Clock::now();
    const double flops = benchmarks.peak(dtype, rounds), seconds = since(start);
    best = std::max(best, flops / seconds);
    if (seconds < 5e-5) rounds *= 2;
  }
  return best;
}

bool is_vector(Isa isa) { return isa != Isa::kAmx && isa != Isa::kTwin; }

}  // namespace

const char* name_of(Isa isa) {
  static const char* const names[kIsas] = {"twin",   "scalar",      "avx2",
                                           "avx512", "avx512_bf16", "amx"};
  return names[int(isa)];
}

bool runs_here(Isa isa) {
  __builtin_cpu_init();
  // These functions also check that the operating system saves the registers (xgetbv).
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool bf16 =
      avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
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
      return bf16;
    case Isa::kAmx:
      return bf16 && amx;
  }
  return false;
}

double core_peak(Isa isa, Dtype dtype) {
  static std::atomic<double> cache[kIsas][kDtypes] = {};
  std::atomic<double>& peak = cache[int(isa)][int(dtype)];
  if (peak == 0) peak = measured_peak(isa, dtype);
  return peak;
}

const std::vector<Isa>& ranked(Dtype dtype) {
  const auto order = [](Dtype type) {
    std::vector<Isa> ranking;
    for (int i = int(Isa::kScalar); i < kIsas; ++i) {
      const Isa next = Isa(i);
      if (!runs_here(next)) continue;
      // The set precedes all sets that are not faster by kRequiredSpeedup. Plain C++ is always
      // last.
      auto position = ranking.begin();
      while (position != ranking.end() && *position != Isa::kScalar &&
             core_peak(*position, type) > kRequiredSpeedup * core_peak(next, type))
        ++position;
      ranking.insert(position, next);
    }
    return ranking;
  };
  // Never deleted: threads may use it during exit.
  static const auto& rankings =
      *new std::array<std::vector<Isa>, kDtypes>{order(Dtype::kFp32), order(Dtype::kBf16)};
  return rankings[size_t(dtype)];
}

Isa isa(Dtype dtype) {
  const int request = requested()[size_t(dtype)].load(std::memory_order_relaxed);
  return request == kAuto ? ranked(dtype).front() : Isa(request);
}

Isa vector_isa(Dtype dtype) {
  const int request = requested()[size_t(dtype)].load(std::memory_order_relaxed);
  if (request == int(Isa::kTwin)) return Isa::kScalar;
  if (request == int(Isa::kAmx)) return Isa::kAvx512Bf16;
  if (request != kAuto) return Isa(request);
  const auto& all = ranked(dtype);
  return *std::find_if(all.begin(), all.end(), is_vector);
}

void request_isa(const std::string& names) {
  const Request request = parsed_request(names);
  for (size_t type = 0; type < kDtypes; ++type) requested()[type] = request[type];
}

std::string requested_isa() {
  const std::string fp32 = name_of_request(requested()[size_t(Dtype::kFp32)]);
  const std::string bf16 = name_of_request(requested()[size_t(Dtype::kBf16)]);
  return fp32 == bf16 ? fp32 : fp32 + "," + bf16;
}

}  // namespace vlora::runtime

#include "runtime/machine.h"

#include <emmintrin.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>

#include "runtime/dispatch.h"
#include "runtime/large_pages.h"

namespace vlora::runtime {
namespace {

constexpr int64_t kBytes = 4 << 20;
// Read once from memory: every line is put out of the caches before.

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double memory_rate() {
  const std::shared_ptr<char> memory = in_large_pages(size_t(kBytes));
  std::memset(memory.get(), 0, size_t(kBytes));
  double best = 0;
  volatile float sink = 0;
  for (int round = 0; round < 3; ++round) {
    for (int64_t at = 0; at < kBytes; at += 64)
      _mm_clflush(memory.get() + at);
    _mm_mfence();
    const auto start = std::chrono::steady_clock::now();
    sink = sink + micro(isa(Dtype::kFp32)).read(reinterpret_cast<const float*>(memory.get()), kBytes / 4);
    best = std::max(best, double(kBytes) / since(start));
  }
  return best;
}

}  // namespace

Machine caches_of(const char* folder) {
  Machine found{32 << 10, 512 << 10, 8 << 20, {}, 0};
  for (int index = 0; index < 8; ++index) {
    const std::string at = std::string(folder) + "/index" + std::to_string(index) + "/";
    std::ifstream level_file(at + "level"), type_file(at + "type"), size_file(at + "size");
    int level = 0;
    std::string type;
    int64_t size = 0;
    char unit = 0;
    if (!(level_file >> level) || !(type_file >> type) || !(size_file >> size) || size <= 0) continue;
    size_file >> unit;
    size <<= unit == 'M' ? 20 : unit == 'K' ? 10 : 0;
    if (type == "Instruction") continue;
    if (level == 1) found.l1 = size;
    if (level == 2) found.l2 = size;
    if (level == 3) found.l3 = size;
  }
  return found;
}

const Machine& machine() {
  static const Machine found = [] {
    Machine m = caches_of("/sys/devices/system/cpu/cpu0/cache");
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) m.peak[int(dtype)] = core_peak(isa(dtype), dtype);
    m.memory = memory_rate();
    return m;
  }();
  return found;
}

}  // namespace vlora::runtime

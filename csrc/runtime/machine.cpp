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

// Bytes read to measure the memory. They are flushed from the caches before each measurement.
constexpr int64_t kBytes = 4 << 20;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double measured_memory_bandwidth() {
  const std::shared_ptr<char> memory = in_large_pages(size_t(kBytes));
  std::memset(memory.get(), 0, size_t(kBytes));
  double best = 0;
  volatile float sink = 0;
  for (int round = 0; round < 3; ++round) {
    for (int64_t offset = 0; offset < kBytes; offset += 64) _mm_clflush(memory.get() + offset);
    _mm_mfence();
    const auto start = std::chrono::steady_clock::now();
    sink = sink + microbenchmarks(isa(Dtype::kFp32))
                      .read(reinterpret_cast<const float*>(memory.get()), kBytes / 4);
    best = std::max(best, double(kBytes) / seconds_since(start));
  }
  return best;
}

// Returns the positive number in a file, or `missing`.
int64_t number_in(const std::string& path, int64_t missing) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number && number > 0 ? number : missing;
}

}  // namespace

Machine caches_of(const char* folder) {
  Machine machine{32 << 10, 512 << 10, 8 << 20, {}, 0};
  for (int index = 0; index < 8; ++index) {
    const std::string cache = std::string(folder) + "/index" + std::to_string(index) + "/";
    std::ifstream level_file(cache + "level"), type_file(cache + "type"), size_file(cache + "size");
    int level = 0;
    std::string type;
    int64_t size = 0;
    char unit = 0;
    if (!(level_file >> level) || !(type_file >> type) || !(size_file >> size) || size <= 0)
      continue;
    size_file >> unit;
    size <<= unit == 'M' ? 20 : unit == 'K' ? 10 : 0;
    if (type == "Instruction") continue;
    if (level == 1) {
      machine.l1 = size;
      machine.l1_ways = number_in(cache + "ways_of_associativity", machine.l1_ways);
      machine.l1_line = number_in(cache + "coherency_line_size", machine.l1_line);
    }
    if (level == 2) machine.l2 = size;
    if (level == 3) machine.l3 = size;
  }
  return machine;
}

const Machine& machine() {
  static const Machine measured = [] {
    Machine m = caches_of("/sys/devices/system/cpu/cpu0/cache");
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16})
      m.peak[int(dtype)] = core_peak(isa(dtype), dtype);
    m.memory = measured_memory_bandwidth();
    return m;
  }();
  return measured;
}

}  // namespace vlora::runtime

// Peak flop/s and memory bandwidth, measured on all threads of a region at the same time.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "runtime/dispatch.h"
#include "runtime/large_pages.h"
#include "runtime/threads.h"

namespace vlora::runtime {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns the best rate of all threads together. prepare(threads) returns a function that does one
// round of work and returns its amount. Each round runs between two barriers. (The sum of each
// thread's best round would be a rate that the machine never reaches: 84 GB/s for a memory of 50
// GB/s.)
template <class Prepare>
double best_rate(int threads, double seconds, const Prepare& prepare) {
  std::atomic<bool> finished{false};
  double best = 0;
  auto work = [&](const Team& team) {
    const auto work_once = prepare(team.threads);
    work_once();
    const auto start = Clock::now();
    while (!finished) {
      team.wait();
      const auto round = Clock::now();
      const double amount = work_once();
      team.wait();
      if (team.thread == 0) {
        best = std::max(best, amount * team.threads / seconds_since(round));
        finished = seconds_since(start) >= seconds;
      }
      team.wait();
    }
  };
  run_on(threads, work);
  return best;
}

// Returns the type whose loop is fastest for `dtype`: bf16 can be widened and multiplied as fp32.
Dtype best_loop(Dtype dtype) {
  const bool pairs = core_peak(isa(dtype), dtype) >= core_peak(isa(dtype), Dtype::kFp32);
  return pairs ? dtype : Dtype::kFp32;
}

}  // namespace

double peak(Dtype dtype, double seconds, int threads) {
  const Microbenchmarks& benchmarks = microbenchmarks(isa(dtype));
  const Dtype loop = best_loop(dtype);
  return best_rate(threads, seconds,
                   [&](int) { return [&] { return benchmarks.peak(loop, 100000); }; });
}

double bandwidth(int64_t bytes, double seconds, int threads) {
  const Microbenchmarks& benchmarks = microbenchmarks(isa(Dtype::kFp32));
  return best_rate(threads, seconds, [&](int count) {
    const int64_t each = std::max<int64_t>(1024, bytes / 4 / count) / 128 * 128;
    const int64_t repeats = std::max<int64_t>(1, (1 << 18) / each);
    const std::shared_ptr<char> memory = in_large_pages(size_t(each) * 4);
    std::memset(memory.get(), 0, size_t(each) * 4);
    return [&benchmarks, memory, each, repeats] {
      const float* const values = reinterpret_cast<const float*>(memory.get());
      volatile float sink = 0;
      for (int64_t i = 0; i < repeats; ++i) sink = sink + benchmarks.read(values, each);
      return 4.0 * double(each) * double(repeats);
    };
  });
}

double multiply(Dtype dtype, int64_t rounds, int threads) {
  const Microbenchmarks& benchmarks = microbenchmarks(isa(dtype));
  const Dtype loop = best_loop(dtype);
  std::atomic<int64_t> flops{0};
  auto work = [&](const Team&) { flops += int64_t(benchmarks.peak(loop, rounds)); };
  run_on(threads, work);
  return double(flops);
}

float read(const void* values, int64_t bytes, int threads) {
  const Microbenchmarks& benchmarks = microbenchmarks(isa(Dtype::kFp32));
  const float* floats = static_cast<const float*>(values);
  std::atomic<float> sum{0};
  auto work = [&](const Team& team) {
    const int64_t from = bytes / 4 * team.thread / team.threads;
    const int64_t end = bytes / 4 * (team.thread + 1) / team.threads;
    sum = benchmarks.read(floats + from, end - from);
  };
  run_on(threads, work);
  return sum;
}

}  // namespace vlora::runtime

// What the machine gives: microbenchmarks on all threads of a region at work together.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "runtime/dispatch.h"
#include "runtime/large_pages.h"
#include "runtime/threads.h"

namespace vlora::runtime {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The best rate of all threads at work together: each does `amount` between two meetings. Their best
// moments apart would add up to what the machine never gives (84 GB/s of a memory that gives 50).
template <class Prepare>
double best_rate(int threads, double seconds, const Prepare& prepare) {
  std::atomic<bool> over{false};
  double best = 0;
  auto work = [&](const Team& team) {
    const auto once = prepare(team.threads);
    once();
    const auto start = Clock::now();
    while (!over) {
      team.wait();
      const auto round = Clock::now();
      const double amount = once();
      team.wait();
      if (team.thread == 0) {
        best = std::max(best, amount * team.threads / since(round));
        over = since(start) >= seconds;
      }
      team.wait();
    }
  };
  run_on(threads, work);
  return best;
}

// The type whose loop is the fastest for this one: bf16 may be multiplied as fp32, widened.
Dtype best_loop(Dtype dtype) {
  const bool pairs = core_peak(isa(dtype), dtype) >= core_peak(isa(dtype), Dtype::kFp32);
  return pairs ? dtype : Dtype::kFp32;
}

}  // namespace

double peak(Dtype dtype, double seconds, int threads) {
  const Micro& of = micro(isa(dtype));
  const Dtype loop = best_loop(dtype);
  return best_rate(threads, seconds, [&](int) { return [&] { return of.peak(loop, 100000); }; });
}

double bandwidth(int64_t bytes, double seconds, int threads) {
  const Micro& of = micro(isa(Dtype::kFp32));
  return best_rate(threads, seconds, [&](int count) {
    const int64_t each = std::max<int64_t>(1024, bytes / 4 / count) / 128 * 128;
    const int64_t repeats = std::max<int64_t>(1, (1 << 18) / each);
    const std::shared_ptr<char> memory = in_large_pages(size_t(each) * 4);
    std::memset(memory.get(), 0, size_t(each) * 4);
    return [&of, memory, each, repeats] {
      const float* const values = reinterpret_cast<const float*>(memory.get());
      volatile float sink = 0;
      for (int64_t i = 0; i < repeats; ++i) sink = sink + of.read(values, each);
      return 4.0 * double(each) * double(repeats);
    };
  });
}

double multiply(Dtype dtype, int64_t rounds, int threads) {
  const Micro& of = micro(isa(dtype));
  const Dtype loop = best_loop(dtype);
  std::atomic<int64_t> flops{0};
  auto work = [&](const Team&) { flops += int64_t(of.peak(loop, rounds)); };
  run_on(threads, work);
  return double(flops);
}

float read(const void* values, int64_t bytes, int threads) {
  const Micro& of = micro(isa(Dtype::kFp32));
  const float* floats = static_cast<const float*>(values);
  std::atomic<float> sum{0};
  auto work = [&](const Team& team) {
    const int64_t from = bytes / 4 * team.thread / team.threads;
    sum = of.read(floats + from, bytes / 4 * (team.thread + 1) / team.threads - from);
  };
  run_on(threads, work);
  return sum;
}

}  // namespace vlora::runtime

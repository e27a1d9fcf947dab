#include "runtime/threads.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace vlora::runtime {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(40);
// A futex wakes a thread in some 10 to 50 us; between two kernels of one layer less passes.

thread_local bool in_region = false;

// Meanwhile numbers too small to be normal are zeros, read and written (FTZ, DAZ): some CPUs take over a
// hundred cycles for each, and weights of a softmax far below its largest make many of them.
class TinyAsZero {
 public:
  TinyAsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~TinyAsZero() { _mm_setcsr(before_); }
  TinyAsZero(const TinyAsZero&) = delete;
  TinyAsZero& operator=(const TinyAsZero&) = delete;

 private:
  const unsigned before_;
};

// What one region shares; lives on the caller's stack.
struct Shared {
  Region work;
  void* context;
  Barrier barrier;
  std::mutex failing;
  std::exception_ptr failure;  // the first

  void run(int thread, int threads) {
    in_region = true;
    const TinyAsZero tiny;
    try {
      work(context, Team{thread, threads, &barrier});
    } catch (const Barrier::Broken&) {
    } catch (...) {
      {
        std::lock_guard<std::mutex> lock(failing);
        if (!failure) failure = std::current_exception();
      }
      barrier.break_up();
    }
    in_region = false;
  }
};

// Threads of our own.
class Pool {
 public:
  void run(int threads, bool late, Shared& shared) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      shared.run(0, 1);
      return;
    }
    threads = start(std::min(threads, kMost + 1) - 1) + 1;
    shared_.store(&shared, std::memory_order_relaxed);
    gate_.value().store(kOpen | uint32_t(threads - 1) << kWanted);
    calls_.value().fetch_add(1);
    calls_.wake(threads - 1);
    shared.run(0, threads);
    // Late: those that are not in by now have nothing to do. Else all have to come, and to go.
    for (;;) {
      uint32_t gate = gate_.load();
      const bool in = late || count(gate, kJoined) == threads - 1;
      if (in && (gate & kOpen)) {
        gate_.value().compare_exchange_weak(gate, gate & ~kOpen);
        continue;
      }
      if (in && count(gate, kInside) == 0) break;
      gate_.wait_while(gate);
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  // The gate's number: whether it is open, and how many are wanted, have gone in, and are inside.
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr int kWanted = 20, kJoined = 10, kInside = 0, kMost = 1023;
  static int count(uint32_t gate, int at) { return int(gate >> at & kMost); }

  // Sees to it that there are so many workers; those there are, if the system gives no more.
  int start(int workers) {
    while (workers_ < workers) {
      try {
        std::thread([this, seen = calls_.load()] { loop(seen); }).detach();
      } catch (const std::system_error&) {
        return workers_;
      }
      ++workers_;
    }
    return workers;
  }

  void loop(uint32_t seen) {
    for (;;) {
      calls_.wait_while(seen);
      seen = calls_.load();
      uint32_t gate = gate_.load();
      while ((gate & kOpen) && count(gate, kJoined) < count(gate, kWanted)) {
        constexpr uint32_t kIn = 1u << kJoined | 1u << kInside;
        if (!gate_.value().compare_exchange_weak(gate, gate + kIn)) continue;
        // The region lasts at least until this thread has gone out again.
        shared_.load(std::memory_order_relaxed)
            ->run(count(gate, kJoined) + 1, count(gate, kWanted) + 1);
        gate_.value().fetch_sub(1u << kInside);
        gate_.wake(1);
        break;
      }
    }
  }

  std::atomic<bool> busy_{false};
  int workers_ = 0;
  Signal calls_, gate_;
  std::atomic<Shared*> shared_{nullptr};
};

// GNU's OpenMP entry points, which LLVM's and Intel's runtimes offer too.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread)();
  int (*threads)();

  OpenMp()
      : parallel(reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))),
        thread(reinterpret_cast<decltype(thread)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"))),
        threads(reinterpret_cast<decltype(threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"))) {}

  explicit operator bool() const { return parallel && thread && threads; }

  // The team keeps its largest size: the runtime would end and make threads at each change.
  void run(int wanted, Shared& shared) const {
    thread_local int largest = 0;
    largest = std::max(largest, wanted);
    struct Borrowed {
      const OpenMp& openmp;
      Shared& shared;
      int wanted;
      std::atomic<int> begun{0}, ended{0};  // the runtime's own order, told to whoever checks ours
    } borrowed{*this, shared, wanted};
    borrowed.begun.store(1, std::memory_order_release);
    parallel(
        [](void* data) {
          Borrowed& b = *static_cast<Borrowed*>(data);
          (void)b.begun.load(std::memory_order_acquire);
          const int thread = b.openmp.thread(), threads = std::min(b.wanted, b.openmp.threads());
          if (thread < threads) b.shared.run(thread, threads);
          b.ended.fetch_add(1, std::memory_order_release);
        },
        &borrowed, unsigned(largest), 0);
    (void)borrowed.ended.load(std::memory_order_acquire);
  }
};

const OpenMp& openmp() {
  static const OpenMp found;
  return found;
}

std::atomic<Pool*> own_pool{nullptr};
std::atomic<Source> asked{Source::kAuto};
std::atomic<bool> forked{false};

// Whether torch's team sleeps while it waits, so that ours can work meanwhile.
bool openmp_sleeps() {
  const char* policy = std::getenv("OMP_WAIT_POLICY");
  return policy && !strcasecmp(policy, "PASSIVE");
}

Pool& pool() {
  Pool* found = own_pool.load(std::memory_order_acquire);
  if (found) return *found;
  // Never deleted: its threads sleep on it until the process ends.
  Pool* const made = new Pool;
  if (own_pool.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

// A child has none of its parent's threads, and OpenMP's runtimes wait for theirs.
void after_fork() {
  own_pool.store(nullptr);
  forked.store(true);
}

struct AtFork {
  AtFork() { pthread_atfork(nullptr, nullptr, after_fork); }
} const at_fork;

}  // namespace

void Signal::wake(int threads) {
  // All in one order: either the sleeper is seen here, or it sees the change before it sleeps.
  if (asleep_.load(std::memory_order_seq_cst))
    syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

void Signal::wait_while(uint32_t seen) {
  const auto start = Clock::now();
  do {
    for (int i = 0; i < 16; ++i) {
      if (load() != seen) return;
      __builtin_ia32_pause();
    }
  } while (Clock::now() - start < kSpin);
  asleep_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == seen)
    syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  asleep_.fetch_sub(1, std::memory_order_relaxed);
}

void Barrier::wait(int threads) {
  const uint32_t round = round_.load();
  if (round & kBroken) throw Broken{};
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
    arrived_.store(0, std::memory_order_relaxed);
    // Not an addition: a thread that breaks the region up meanwhile is not to be undone.
    uint32_t expected = round;
    round_.value().compare_exchange_strong(expected, (round + 1) & ~kBroken);
    round_.wake(INT_MAX);
  } else {
    round_.wait_while(round);
  }
  if (round_.load() & kBroken) throw Broken{};
}

void Barrier::break_up() {
  round_.value().fetch_or(kBroken);
  round_.wake(INT_MAX);
}

bool use_threads(Source source) {
  if (source == Source::kOpenMp && (!openmp() || forked)) return false;
  asked = source;
  return true;
}

Source threads_in_use() {
  if (asked == Source::kOwn || forked || !openmp()) return Source::kOwn;
  return asked == Source::kOpenMp || !openmp_sleeps() ? Source::kOpenMp : Source::kOwn;
}

void run_region(int threads, bool late, Region work, void* context) {
  Shared shared{work, context, {}, {}, {}};
  if (threads <= 1 || in_region) {
    const TinyAsZero tiny;
    work(context, Team{0, 1, &shared.barrier});
    return;
  }
  if (threads_in_use() == Source::kOpenMp) {
    openmp().run(threads, shared);
  } else {
    pool().run(threads, late, shared);
  }
  if (shared.failure) std::rethrow_exception(shared.failure);
}

}  // namespace vlora::runtime

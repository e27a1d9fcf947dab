#include "runtime/threads.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "runtime/kernel_scope.h"

namespace vlora::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// Time that a waiting thread spins before it sleeps. Waking it with a futex takes 10 to 50 µs. Less
// time passes between two kernels of a layer.
constexpr auto kSpin = std::chrono::microseconds(40);

thread_local bool in_region = false;

// The state of one region, on its caller's stack.
struct RegionState {
  Region work;
  void* context;
  Barrier barrier;
  std::mutex mutex;
  std::exception_ptr failure;  // the first exception of any thread

  void run(int thread, int threads) {
    in_region = true;
    const KernelScope scope;
    try {
      work(context, Team{thread, threads, &barrier});
    } catch (const Barrier::Broken&) {
    } catch (...) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (!failure) failure = std::current_exception();
      }
      barrier.break_up();
    }
    in_region = false;
  }
};

// The threads of this process. They serve one region at a time.
class Pool {
 public:
  void run(int threads, bool independent, RegionState& region) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      region.run(0, 1);
      return;
    }
    const struct Release {
      std::atomic<bool>& busy;
      ~Release() { busy.store(false, std::memory_order_release); }
    } release{busy_};
    threads = start(std::min(threads, kMaxCount + 1) - 1) + 1;
    region_.store(&region, std::memory_order_relaxed);
    gate_.value().store(kOpen | uint32_t(threads - 1) << kWanted);
    calls_.value().fetch_add(1);
    calls_.wake(threads - 1);
    region.run(0, threads);
    // In an independent region, workers that have not entered by now have nothing to do. In other
    // regions all workers must enter and leave.
    for (;;) {
      uint32_t gate = gate_.load();
      const bool complete = independent || count(gate, kJoined) == threads - 1;
      if (complete && (gate & kOpen)) {
        gate_.value().compare_exchange_weak(gate, gate & ~kOpen);
        continue;
      }
      if (complete && count(gate, kInside) == 0) break;
      gate_.wait_while(gate);
    }
  }

 private:
  // The gate's value has a bit that says whether it is open, and three counts of workers at these
  // bit positions: those wanted, those that have entered, and those inside.
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr int kWanted = 20, kJoined = 10, kInside = 0, kMaxCount = 1023;
  static int count(uint32_t gate, int position) { return int(gate >> position & kMaxCount); }

  // Starts workers until there are `workers` of them. Returns their number, which is smaller if the
  // system has no threads or no memory for more.
  int start(int workers) {
    while (workers_ < workers) {
      try {
        std::thread([this, seen = calls_.load()] { loop(seen); }).detach();
      } catch (const std::system_error&) {
        return workers_;
      } catch (const std::bad_alloc&) {
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
        constexpr uint32_t kEnter = 1u << kJoined | 1u << kInside;
        if (!gate_.value().compare_exchange_weak(gate, gate + kEnter)) continue;
        // The region exists at least until this thread leaves it.
        region_.load(std::memory_order_relaxed)
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
  std::atomic<RegionState*> region_{nullptr};
};

// Entry points of GNU's OpenMP runtime. LLVM's and Intel's runtimes have them too.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread)();
  int (*threads)();

  OpenMp()
      : parallel(reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))),
        thread(reinterpret_cast<decltype(thread)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"))),
        threads(reinterpret_cast<decltype(threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"))) {}

  explicit operator bool() const { return parallel && thread && threads; }

  // Runs a region on `wanted` threads of a team that keeps its largest size so far: the runtime
  // would end and start threads at each change of size.
  void run(int wanted, RegionState& region) const {
    thread_local int largest = 0;
    largest = std::max(largest, wanted);
    struct Borrowed {
      const OpenMp& openmp;
      RegionState& region;
      int wanted;
      // These repeat the runtime's own synchronization in a form that thread sanitizers see.
      std::atomic<int> started{0}, ended{0};
    } borrowed{*this, region, wanted};
    borrowed.started.store(1, std::memory_order_release);
    parallel(
        [](void* data) {
          Borrowed& b = *static_cast<Borrowed*>(data);
          (void)b.started.load(std::memory_order_acquire);
          const int thread = b.openmp.thread(), threads = std::min(b.wanted, b.openmp.threads());
          if (thread < threads) b.region.run(thread, threads);
          b.ended.fetch_add(1, std::memory_order_release);
        },
        &borrowed, unsigned(largest), 0);
    (void)borrowed.ended.load(std::memory_order_acquire);
  }
};

const OpenMp& openmp() {
  static const OpenMp entry_points;
  return entry_points;
}

std::atomic<Pool*> own_pool{nullptr};
std::atomic<ThreadSource> requested{ThreadSource::kAuto};
std::atomic<bool> forked{false};

// Whether torch's threads sleep while they wait, which leaves the cores to our own threads. The
// variable is read once, when this library is loaded, as OpenMP's runtime reads it: Python may
// change its environment while kernels run.
const bool openmp_sleeps = [] {
  const char* const policy = std::getenv("OMP_WAIT_POLICY");
  return policy && !strcasecmp(policy, "PASSIVE");
}();

Pool& pool() {
  Pool* existing = own_pool.load(std::memory_order_acquire);
  if (existing) return *existing;
  // The pool is never deleted: its threads sleep on it until the process ends.
  Pool* const created = new Pool;
  if (own_pool.compare_exchange_strong(existing, created)) return *created;
  delete created;
  return *existing;
}

// A forked child has no threads of its parent, and OpenMP runtimes would wait for them.
void after_fork() {
  own_pool.store(nullptr);
  forked.store(true);
}

struct AtFork {
  AtFork() { pthread_atfork(nullptr, nullptr, after_fork); }
} const at_fork;

}  // namespace

void Signal::wake(int threads) {
  // All these operations have one order. Either this thread sees the sleeping one, or that thread
  // sees the change before it sleeps.
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
    // An addition could undo the bit that another thread sets to break up the region.
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

bool set_thread_source(ThreadSource source) {
  if (source == ThreadSource::kOpenMp && (!openmp() || forked)) return false;
  requested = source;
  return true;
}

ThreadSource thread_source() {
  if (requested == ThreadSource::kOwn || forked || !openmp()) return ThreadSource::kOwn;
  return requested == ThreadSource::kOpenMp || !openmp_sleeps ? ThreadSource::kOpenMp
                                                              : ThreadSource::kOwn;
}

void run_region(int threads, bool independent, Region work, void* context) {
  RegionState region{work, context, {}, {}, {}};
  if (threads <= 1 || in_region) {
    work(context, Team{0, 1, &region.barrier});
    return;
  }
  if (thread_source() == ThreadSource::kOpenMp) {
    openmp().run(threads, region);
  } else {
    pool().run(threads, independent, region);
  }
  if (region.failure) std::rethrow_exception(region.failure);
}

}  // namespace vlora::runtime

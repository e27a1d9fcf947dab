// The team of threads that all kernels of the process share.
//
// There are two ways to use it. `share_out` and `run_independent` are for work in pieces that do
// not depend on each other: a free thread takes the next piece. A thread that is late, because
// another process has its core, finds no piece left and is not waited for. `run_on` is for
// regions with barriers (`Team::wait`), in which all threads take part. Work inside such a region
// should be taken in pieces as well (`Pieces`).
//
// Threads are kept and reused. Those that a region does not need stay asleep. A waiting thread
// spins briefly, then sleeps. If torch's OpenMP threads spin while they wait (that is,
// OMP_WAIT_POLICY was not PASSIVE when this library was loaded), they are borrowed instead, since
// two teams would compete for the same cores. A call inside a region, or during another thread's
// region, runs on its caller alone. An exception in any thread ends the region, and the call
// rethrows it. A forked child gets its own team. The caller is in a KernelScope (kernel_scope.h),
// and each thread of a region gets one.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace vlora::runtime {

// A number that threads can wait on.
class Signal {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  std::atomic<uint32_t>& value() { return value_; }
  // Wakes waiting threads. A sequentially consistent operation must have changed the value.
  void wake(int threads);
  // Returns when the value differs from `seen`. Spins briefly, then sleeps.
  void wait_while(uint32_t seen);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> asleep_{0};
};

// A barrier for all threads of a region.
class Barrier {
 public:
  // Waits for the other threads. Throws Broken once a thread has left the region by an exception.
  void wait(int threads);
  void break_up();

  struct Broken {};

 private:
  static constexpr uint32_t kBroken = 1u << 31;
  std::atomic<int> arrived_{0};
  Signal round_;
};

// One thread's view of its region.
struct Team {
  int thread, threads;
  Barrier* barrier;

  void wait() const {
    if (threads > 1) barrier->wait(threads);
  }
};

// The numbers 0 … count - 1, each of which one thread takes.
class Pieces {
 public:
  explicit Pieces(int64_t count = 0) : count_(count) {}
  // Returns the next piece, or -1.
  int64_t take() {
    const int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    return piece < count_ ? piece : -1;
  }
  // Takes up to `max_pieces` pieces, [*begin, *end). Returns false if there are none left.
  bool take(int64_t max_pieces, int64_t* begin, int64_t* end) {
    *begin = next_.fetch_add(max_pieces, std::memory_order_relaxed);
    *end = *begin + max_pieces < count_ ? *begin + max_pieces : count_;
    return *begin < count_;
  }

 private:
  const int64_t count_;
  std::atomic<int64_t> next_{0};
};

// Sources of threads. kAuto follows the rule at the top of this file.
enum class ThreadSource { kAuto, kOwn, kOpenMp };
// Sets the source, for tests and sanitizers. It must not be called while a region runs. Returns
// false if the process has no OpenMP runtime to borrow threads from.
bool set_thread_source(ThreadSource source);
// Returns kOwn or kOpenMp.
ThreadSource thread_source();

using Region = void (*)(void* context, const Team& team);
// independent: do not wait for threads that have not started when the caller's part is done.
void run_region(int threads, bool independent, Region work, void* context);

// Calls work(team) on `threads` threads, or on the caller alone. The caller is thread 0.
template <class Work>
void run_on(int threads, Work& work) {
  run_region(
      threads, false, [](void* context, const Team& team) { (*static_cast<Work*>(context))(team); },
      &work);
}

// Calls work(team) likewise, for work without barriers that threads take in pieces.
template <class Work>
void run_independent(int threads, Work& work) {
  run_region(
      threads, true, [](void* context, const Team& team) { (*static_cast<Work*>(context))(team); },
      &work);
}

// Calls work(piece) for all pieces, on up to `threads` threads.
template <class Work>
void share_out(int threads, int64_t pieces, const Work& work) {
  Pieces remaining(pieces);
  auto take = [&](const Team&) {
    for (int64_t piece; (piece = remaining.take()) >= 0;) work(piece);
  };
  run_independent(threads < pieces ? threads : int(pieces), take);
}

}  // namespace vlora::runtime

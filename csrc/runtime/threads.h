// One team of threads for all kernels of the process.
//
// Two ways to use it. `share_out` and `run_late` are for work in pieces that need nothing of each
// other: whoever is free takes the next one, and a thread that comes late, since a neighbour has its
// core, finds nothing left and is not waited for. `run_on` is for a region with meetings (`Team::wait`): all its
// threads take part; inside it work is best taken in pieces as well (`Pieces`).
//
// Threads are kept, as many as were ever asked for; those that a region has no use for sleep on. A
// waiting thread spins shortly, then sleeps. If torch's OpenMP team spins while it waits (that is,
// OMP_WAIT_POLICY is not PASSIVE), it is borrowed instead: two teams on the same cores would fight.
// A call inside a region, or while another thread's region runs, is done by its caller alone. An
// exception in any thread ends the region and is thrown by the call. A forked child gets a team of
// its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace vlora::runtime {

// A number that threads wait on.
class Signal {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  std::atomic<uint32_t>& value() { return value_; }
  void wake(int threads);  // after a change of the value, by an operation that is sequentially consistent
  // Returns when the value is another one: spins shortly, then sleeps.
  void wait_while(uint32_t seen);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> asleep_{0};
};

// All threads of a region wait for each other.
class Barrier {
 public:
  // Throws Broken once a thread has left the region by an exception.
  void wait(int threads);
  void break_up();

  struct Broken {};

 private:
  static constexpr uint32_t kBroken = 1u << 31;
  std::atomic<int> arrived_{0};
  Signal round_;
};

// A thread's place in its region.
struct Team {
  int thread, threads;
  Barrier* barrier;

  void wait() const {
    if (threads > 1) barrier->wait(threads);
  }
};

// Numbers 0 … count - 1, each given to one thread.
class Pieces {
 public:
  explicit Pieces(int64_t count = 0) : count_(count) {}
  // The next piece, or -1.
  int64_t take() {
    const int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    return piece < count_ ? piece : -1;
  }
  // The next `most` or fewer pieces: false if there are none.
  bool take(int64_t most, int64_t* begin, int64_t* end) {
    *begin = next_.fetch_add(most, std::memory_order_relaxed);
    *end = *begin + most < count_ ? *begin + most : count_;
    return *begin < count_;
  }

 private:
  const int64_t count_;
  std::atomic<int64_t> next_{0};
};

enum class Source { kAuto, kOwn, kOpenMp };
// Which threads serve; kAuto is the rule above. For tests and for the sanitizers: not while a region
// runs. False if the process has no OpenMP to borrow.
bool use_threads(Source source);
Source threads_in_use();

using Region = void (*)(void* context, const Team& team);
// late: threads that have not begun when the caller's part has ended are not waited for.
void run_region(int threads, bool late, Region work, void* context);

// work(team) on `threads` threads, or on the caller alone; the caller is thread 0.
template <class Work>
void run_on(int threads, Work& work) {
  run_region(
      threads, false,
      [](void* context, const Team& team) { (*static_cast<Work*>(context))(team); }, &work);
}

// The same for work that needs no meeting and is taken in pieces: late threads are not waited for.
template <class Work>
void run_late(int threads, Work& work) {
  run_region(
      threads, true,
      [](void* context, const Team& team) { (*static_cast<Work*>(context))(team); }, &work);
}

// work(piece) for all pieces, on up to `threads` threads.
template <class Work>
void share_out(int threads, int64_t pieces, const Work& work) {
  Pieces taken(pieces);
  auto take = [&](const Team&) {
    for (int64_t piece; (piece = taken.take()) >= 0;) work(piece);
  };
  run_late(threads < pieces ? threads : int(pieces), take);
}

}  // namespace vlora::runtime

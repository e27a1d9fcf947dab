// Checks the state after an allocation has failed in a parallel region. The first allocation of a
// thread that sets `fails` throws std::bad_alloc.
//
// Prints each check that failed. The exit status is their number.
#define VLORA_ISA twin
#include <xmmintrin.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "runtime/kernel_scope.h"
#include "runtime/threads.h"
#include "runtime/tile_twin.h"

// This follows the registers that it uses.
#include "runtime/tile_product.h"

static thread_local bool fails = false;

void* operator new(size_t bytes) {
  void* const memory = fails ? nullptr : std::malloc(bytes);
  fails = false;
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

using namespace vlora::runtime;

namespace {

constexpr int kThreads = 4;
int failed = 0;

void check(bool holds, const char* what) {
  if (!holds) std::printf("%s\n", what), ++failed;
}

// Runs `work` on some threads while an allocation by the caller fails.
template <class Work>
bool throws(int threads, Work& work) {
  const KernelScope scope;
  fails = true;
  try {
    run_on(threads, work);
  } catch (const std::bad_alloc&) {
    return true;
  }
  fails = false;
  return false;
}

// First the pool itself cannot be allocated, then each of its threads.
void check_start() {
  for (int threads = 2; threads <= kThreads; ++threads) {
    int team_size = 0;
    auto work = [&](const Team& team) {
      if (team.thread == 0) team_size = team.threads;
    };
    if (throws(threads, work) != (threads == 2)) check(false, "a thread that cannot start throws");
    run_on(threads, work);
    check(team_size == threads, "the pool stays busy after a thread could not start");
  }
}

void check_tiles() {
  for (int threads : {1, kThreads}) {
    auto multiply = [](const Team&) {
      twin::configure(kAmxRows, kAmxRows, kAmxRows);
      fails = true;
      operator delete(operator new(1));
    };
    check(throws(threads, multiply), "an allocation that fails in a region is not reported");
    std::atomic<int> configured{0};
    auto count = [&](const Team& team) {
      configured += twin::configured.steps || twin::TileRegisters::at(0).rows;
      team.wait();
    };
    run_on(threads, count);
    check(configured == 0, "tile registers stay configured after a failure");
  }
}

void check_mode() {
  const unsigned before = _mm_getcsr(), caller = before | 0x6000;  // rounding towards zero
  _mm_setcsr(caller);
  std::atomic<int> others{0};
  auto work = [&](const Team& team) {
    others += (_mm_getcsr() & 0xffc0) != 0x9fc0;
    team.wait();
    operator delete(operator new(1));
  };
  for (int threads : {1, kThreads}) throws(threads, work);
  check(others == 0, "a thread does not round to nearest or does not flush subnormal numbers");
  check(_mm_getcsr() == caller, "the caller's mode is not restored");
  _mm_setcsr(before);
}

}  // namespace

int main() {
  set_thread_source(ThreadSource::kOwn);
  check_start();
  check_tiles();
  check_mode();
  return failed;
}

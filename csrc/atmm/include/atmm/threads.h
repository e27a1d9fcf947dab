// Threads for one call. Torch's OpenMP team is borrowed where the process has one, so that the
// cores are not fought over by two teams; else a small pool of our own that sleeps when idle.
#pragma once

#include <atomic>

namespace vlora::atmm {

// work(context, thread, threads) on `threads` threads, or fewer; the caller is one of them.
void run_on(int threads, void (*work)(void*, int thread, int threads), void* context);

template <class Work>
void run_on(int threads, Work& work) {
  if (threads <= 1) {
    work(0, 1);
    return;
  }
  run_on(
      threads, [](void* context, int thread, int count) { (*static_cast<Work*>(context))(thread, count); },
      &work);
}

// All threads of a call wait for each other; a call has its own.
class Barrier {
 public:
  void wait(int threads);

 private:
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
};

}  // namespace vlora::atmm

#include "atmm/threads.h"

#include <dlfcn.h>
#include <sched.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace vlora::atmm {
namespace {

struct Task {
  void (*work)(void*, int, int);
  void* context;
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
};

const OpenMp& openmp() {
  static const OpenMp found;
  return found;
}

void in_team(void* data) {
  const Task& task = *static_cast<const Task*>(data);
  task.work(task.context, openmp().thread(), openmp().threads());
}

// Workers sleep on a condition variable between calls.
class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(int threads, const Task& task) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy) {  // another thread's call has the workers: this one runs on its caller
      task.work(task.context, 0, 1);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(workers_.size()) < threads - 1)
        workers_.emplace_back([this, id = int(workers_.size()) + 1] { loop(id); });
      task_ = task;
      threads_ = threads;
      left_ = threads - 1;
      ++call_;
    }
    wake_.notify_all();
    task.work(task.context, 0, threads);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  void loop(int id) {
    std::unique_lock<std::mutex> lock(mutex_);
    unsigned seen = 0;
    for (;;) {
      wake_.wait(lock, [&] { return closing_ || (call_ != seen && id < threads_); });
      if (closing_) return;
      seen = call_;
      const Task task = task_;
      const int threads = threads_;
      lock.unlock();
      task.work(task.context, id, threads);
      lock.lock();
      if (--left_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Task task_{};
  int threads_ = 0, left_ = 0;
  unsigned call_ = 0;
  bool closing_ = false;
};

}  // namespace

void run_on(int threads, void (*work)(void*, int, int), void* context) {
  Task task{work, context};
  if (openmp()) {
    openmp().parallel(in_team, &task, unsigned(threads), 0);
    return;
  }
  static Pool pool;
  pool.run(threads, task);
}

void Barrier::wait(int threads) {
  if (threads <= 1) return;
  const int round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  // The others are at most one block of rows behind; past that, let whoever has their core run.
  for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
    if (spins < 2000) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }
}

}  // namespace vlora::atmm

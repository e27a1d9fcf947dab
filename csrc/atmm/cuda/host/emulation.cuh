// Runs CUDA kernels on the host, one block after another in a shuffled order, with a separate stack
// for each thread of a block. A thread runs until it waits for its warp (sum_lanes) or for its
// block (__syncthreads). The program stops at code that would hang or be undefined on a device: if
// not all lanes of a warp reach a sum, or if some threads wait for their block while others wait
// for their warp.
//
// Not emulated: concurrent threads of different blocks, memory ordering, tensor cores, and streams
// (a launch is complete when it returns). Nothing here is specific to ATMM.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks do not overlap
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

namespace emulation {

// The storage types. Conversions round to nearest even, as the device's do.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};
inline float to_float(float v) { return v; }
inline float to_float(Bfloat v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  return std::memcpy(&f, &bits, 4), f;
}
inline float to_float(Half v) {
  _Float16 h;
  return std::memcpy(&h, &v, 2), float(h);
}
template <typename T>
T from_float(float v);
template <>
inline float from_float<float>(float v) {
  return v;
}
template <>
inline Half from_float<Half>(float v) {
  const _Float16 h = _Float16(v);
  Half to;
  return std::memcpy(&to, &h, 2), to;
}
template <>
inline Bfloat from_float<Bfloat>(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if (v != v) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Work of the kernels since the library was loaded, for tests that compare costs.
struct Counts {
  uint64_t blocks;           // launched
  uint64_t shared_accesses;  // to dynamic shared memory
  uint64_t warp_counts;      // calls of count_lanes, once for each lane
  uint64_t launches;
};
inline Counts& counts() {
  static Counts all{};
  return all;
}

constexpr int kLanes = 32;
constexpr size_t kStack = 64 << 10, kSharedBytes = 228 << 10;

enum class State { kReady, kWarp, kBlock, kDone };

struct Thread {
  jmp_buf at;
  ucontext_t start;
  std::unique_ptr<char[]> stack;
  State state = State::kDone;
  dim3 index;
  float* values = nullptr;  // arguments of sum_lanes
  int count = 0, lanes = 0;
};

class Block {
 public:
  static Block& here() {
    static thread_local Block block;
    return block;
  }

  void run(dim3 grid, int threads, const std::function<void()>& body) {
    grid_ = grid, size_ = dim3(unsigned(threads)), body_ = &body;
    while (int(threads_.size()) < threads) threads_.push_back(std::make_unique<Thread>());
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    counts().blocks += blocks;
    ++counts().launches;
    // Visit each block once in a shuffled order: an odd step modulo a power of two is a bijection.
    // Indices beyond the last block are skipped.
    uint64_t ring = 1;
    while (ring < blocks) ring *= 2;
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    const uint64_t step = random_ >> 20 | 1, first = random_ >> 40;
    for (uint64_t i = 0; i < ring; ++i) {
      const uint64_t at = (first + i * step) & (ring - 1);
      if (at >= blocks) continue;
      index_ = dim3(unsigned(at % grid.x), unsigned(at / grid.x % grid.y),
                    unsigned(at / grid.x / grid.y));
      run_block(threads);
    }
  }

  // Called by the running thread: runs the other threads until its wait is over.
  void wait(State what) {
    Thread& thread = *current_;
    thread.state = what;
    if (_setjmp(thread.at) == 0) _longjmp(scheduler_, 1);
  }

  [[noreturn]] static void stop(const char* why) {
    std::fprintf(stderr, "emulated kernel: %s\n", why);
    std::abort();
  }

  Thread& current() { return *current_; }
  const dim3& index() const { return index_; }
  const dim3& size() const { return size_; }
  const dim3& grid() const { return grid_; }
  uint4* shared() { return shared_.data(); }

 private:
  void run_block(int threads) {
    for (int t = 0; t < threads; ++t) {
      threads_[size_t(t)]->index = dim3(unsigned(t), 0, 0);
      threads_[size_t(t)]->state = State::kReady;
    }
    for (;;) {
      bool ran = false;
      for (int t = 0; t < threads; ++t) {
        if (threads_[size_t(t)]->state != State::kReady) continue;
        ran = true;
        resume(*threads_[size_t(t)]);
        if ((t + 1) % kLanes == 0 || t + 1 == threads)
          if (sum_warp(t / kLanes * kLanes, threads))
            t = t / kLanes * kLanes - 1;  // run that warp again
      }
      if (ran) continue;
      int waiting = 0, done = 0;
      for (int t = 0; t < threads; ++t) {
        waiting += threads_[size_t(t)]->state == State::kBlock;
        done += threads_[size_t(t)]->state == State::kDone;
      }
      if (done == threads) return;
      if (waiting + done != threads)
        stop("some threads wait for their block and others for their warp");
      for (int t = 0; t < threads; ++t)
        if (threads_[size_t(t)]->state == State::kBlock) threads_[size_t(t)]->state = State::kReady;
    }
  }

  // Sums with the xor tree of the device's shuffles, in the same order. Returns false if no lane
  // waits.
  bool sum_warp(int first, int threads) {
    Thread& leader = *threads_[size_t(first)];
    int arrived = 0;
    for (int l = first; l < first + kLanes && l < threads; ++l)
      arrived += threads_[size_t(l)]->state == State::kWarp;
    if (arrived == 0) return false;
    if (arrived != kLanes) stop("not all lanes of a warp reach its sum");
    for (int l = 0; l < kLanes; ++l) {
      const Thread& lane = *threads_[size_t(first + l)];
      if (lane.count != leader.count || lane.lanes != leader.lanes)
        stop("lanes differ in their sums");
    }
    for (int step = leader.lanes / 2; step > 0; step /= 2)
      for (int i = 0; i < leader.count; ++i) {
        float before[kLanes];
        for (int l = 0; l < kLanes; ++l) before[l] = threads_[size_t(first + l)]->values[i];
        for (int l = 0; l < kLanes; ++l)
          threads_[size_t(first + l)]->values[i] = before[l] + before[l ^ step];
      }
    for (int l = 0; l < kLanes; ++l) threads_[size_t(first + l)]->state = State::kReady;
    return true;
  }

  void resume(Thread& thread) {
    current_ = &thread;
    if (_setjmp(scheduler_) != 0) return;
    if (thread.stack) _longjmp(thread.at, 1);
    thread.stack.reset(new char[kStack]);
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.get();
    thread.start.uc_stack.ss_size = kStack;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, &Block::enter, 0);
    setcontext(&thread.start);
  }

  // The entry point of every thread: runs the body of one block after another.
  static void enter() {
    for (;;) {
      Block& block = here();
      (*block.body_)();
      block.wait(State::kDone);
    }
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<uint4> shared_ = std::vector<uint4>(kSharedBytes / sizeof(uint4));
  const std::function<void()>* body_ = nullptr;
  Thread* current_ = nullptr;
  jmp_buf scheduler_;
  dim3 grid_, size_, index_;
  uint64_t random_ = 1;
};

// A pointer to dynamic shared memory that counts the accesses.
template <typename T>
class Shared {
 public:
  T& operator[](int64_t i) const {
    ++counts().shared_accesses;
    return values_[i];
  }

 private:
  T* values_ = reinterpret_cast<T*>(Block::here().shared());
};

template <typename... P, typename... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t,
                   A... args) {
  if (shared_bytes > kSharedBytes) std::abort();
  Block::here().run(grid, threads, [&] { kernel(args...); });
  return cudaSuccess;
}

template <typename... P>
cudaError_t warm(void (*)(P...), int, int, int* resident) {
  *resident = 5;  // a small number, so that each block computes several items
  return cudaSuccess;
}

template <int N>
void sum_lanes(float (&values)[N], int lanes) {
  Thread& thread = Block::here().current();
  thread.values = values, thread.count = N, thread.lanes = lanes;
  Block::here().wait(State::kWarp);
}

// Returns the number of lanes of the warp for which `value` is true.
inline int count_lanes(bool value) {
  ++counts().warp_counts;
  float count[1] = {float(value)};
  sum_lanes(count, kLanes);
  return int(count[0]);
}

inline void sync_block() { Block::here().wait(State::kBlock); }

inline void signal(unsigned* counter) {
  sync_block();
  if (Block::here().current().index.x == 0) ++*counter;
}

// Blocks run one after another, so a block that would wait would never end.
inline void wait_for(const unsigned* counter, unsigned value) {
  if (*counter < value) Block::stop("a block waits for work that no earlier block has done");
  sync_block();
}

}  // namespace emulation

#define threadIdx (::emulation::Block::here().current().index)
#define blockIdx (::emulation::Block::here().index())
#define blockDim (::emulation::Block::here().size())
#define gridDim (::emulation::Block::here().grid())

inline void __syncthreads() { emulation::sync_block(); }

template <typename T>
T __ldg(const T* p) {
  return *p;
}

inline uint64_t atomicCAS(unsigned long long* at, unsigned long long expected,
                          unsigned long long value) {
  const unsigned long long before = *at;
  if (before == expected) *at = value;
  return before;
}

inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = before + value;
  return before;
}

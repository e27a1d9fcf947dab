// Memory that a thread keeps from call to call.
#pragma once

#include <cstdlib>
#include <new>

#include "runtime/large_pages.h"
#include "runtime/types.h"

namespace vlora::runtime {

// One allocation on a cache line, as large as the largest that was asked for; contents are not kept
// when it grows. Meant to be thread_local.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  float* get(int64_t floats) {
    if (floats > size_) {
      std::free(memory_);
      size_ = ceil_div(floats, 1024) * 1024;
      memory_ = std::aligned_alloc(64, size_t(size_) * sizeof(float));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return static_cast<float*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

// The same in large pages, for what is read from end to end, again and again: in small ones its lines would
// share the sets of L2 by chance.
class LargeScratch {
 public:
  float* get(int64_t floats) {
    if (floats > size_) {
      memory_.reset();
      size_ = 0;
      memory_ = in_large_pages(size_t(floats) * sizeof(float));
      size_ = floats;
    }
    return reinterpret_cast<float*>(memory_.get());
  }

 private:
  std::shared_ptr<char> memory_;
  int64_t size_ = 0;
};

}  // namespace vlora::runtime

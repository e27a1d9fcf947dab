// Buffers that a thread reuses from call to call.
#pragma once

#include <cstdlib>
#include <new>

#include "runtime/large_pages.h"
#include "runtime/types.h"

namespace vlora::runtime {

// One allocation, aligned to a cache line and as large as the largest request so far. Its contents
// are lost when it grows. It is meant to be thread_local.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // Throws std::bad_alloc.
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
  int64_t size_ = 0;  // floats
};

// Scratch in large pages, for buffers that are read from end to end again and again. Ordinary pages
// are scattered over physical memory. By chance, too many of their lines can then fall on the same
// sets of L2.
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
  int64_t size_ = 0;  // floats
};

}  // namespace vlora::runtime

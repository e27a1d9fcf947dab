// The state of a thread's CPU while it runs kernels.
#pragma once

namespace vlora::runtime {

// While it exists, its thread rounds to nearest and treats subnormal numbers as zeros (FTZ and
// DAZ), whatever its caller's mode is, so that a result does not depend on the thread that computes
// it. Some CPUs take over a hundred cycles for each subnormal number, and the softmax produces
// many: weights far below the largest one.
//
// When it ends, with or without an exception, the caller's mode is restored and tile registers that
// the thread has configured are released. Every thread of a region has one (threads.h); the caller
// of an operator makes one for the work that the operator does outside regions (kernel_call.h).
class KernelScope {
 public:
  KernelScope();
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  const unsigned before_;
};

// Makes the end of this thread's KernelScope call `release`. A tile unit calls it when it has
// configured its registers.
void release_at_scope_end(void (*release)());

}  // namespace vlora::runtime

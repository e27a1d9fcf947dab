// The state of a thread's CPU while it runs kernels.
#pragma once

namespace vlora::runtime {

// Scope of kernels: while it exists, its thread rounds to nearest and treats subnormal numbers as
// zeros (FTZ and DAZ). A result thus does not depend on the thread that computes it, or on the
// caller's mode. Without these modes, some CPUs take over a hundred cycles for an operation with a
// subnormal number.
//
// When it ends, even through an exception, the caller's mode is restored, and tile registers that
// the thread has configured are released. Every thread of a region has one (threads.h). The caller
// of an operator makes one for the operator's work outside regions (kernel_call.h).
class KernelScope {
 public:
  KernelScope();
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  const unsigned before_;
};

// Makes the end of this thread's KernelScope call `release`. A tile unit calls this after it has
// configured its registers.
void release_at_scope_end(void (*release)());

}  // namespace vlora::runtime

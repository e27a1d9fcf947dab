#include "runtime/kernel_scope.h"

#include <xmmintrin.h>

namespace vlora::runtime {
namespace {

// All exceptions masked, rounding to nearest, FTZ (bit 15) and DAZ (bit 6).
constexpr unsigned kMode = 0x1f80 | 0x8040;

thread_local void (*release_tiles)() = nullptr;

}  // namespace

KernelScope::KernelScope() : before_(_mm_getcsr()) { _mm_setcsr(kMode); }

KernelScope::~KernelScope() {
  if (release_tiles) release_tiles();
  release_tiles = nullptr;
  _mm_setcsr(before_);
}

void release_at_scope_end(void (*release)()) { release_tiles = release; }

}  // namespace vlora::runtime

// Four fp32 values in an SSE register, which every x86-64 CPU has: sums over lanes, and 4 x 4
// transposes.
#pragma once

#include <xmmintrin.h>

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct Quad {
  __m128 r;
  static constexpr int kWidth = 4;

  static Quad load(const float* p) { return {_mm_loadu_ps(p)}; }
  void store(float* p) const { _mm_storeu_ps(p, r); }
  friend Quad operator+(Quad a, Quad b) { return {_mm_add_ps(a.r, b.r)}; }
  friend Quad max(Quad a, Quad b) { return {_mm_max_ps(a.r, b.r)}; }

  static void transpose(Quad (&q)[4]) { _MM_TRANSPOSE4_PS(q[0].r, q[1].r, q[2].r, q[3].r); }

  float sum() const {
    const __m128 s = _mm_add_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  float largest() const {
    const __m128 m = _mm_max_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
};

}  // namespace vlora::runtime::VLORA_ISA

// What the registers of all instruction sets share: sums over lanes, the exponential function.
// Included after an instruction set's register.
#pragma once

#include <xmmintrin.h>

namespace vlora::runtime::VLORA_ISA {

#define VLORA_INLINE inline __attribute__((always_inline))

VLORA_INLINE float sum_of(R a) {
  __m128 s = a.folded();
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// The sums of four registers' lanes.
VLORA_INLINE __m128 sums_of(R a, R b, R c, R d) {
  __m128 s0 = a.folded(), s1 = b.folded(), s2 = c.folded(), s3 = d.folded();
  _MM_TRANSPOSE4_PS(s0, s1, s2, s3);
  return _mm_add_ps(_mm_add_ps(s0, s1), _mm_add_ps(s2, s3));
}

// e to the power of x, to about 1.5 units in the last place; below -87.3 the smallest normal number,
// above 88 that of 88. A NaN stays one.
VLORA_INLINE R exponential(R x) {
  // The bound first: where x is a NaN, min and max give their second operand.
  x = max(R::all(-87.33f), min(R::all(88.0f), x));
  const R n = (x * R::all(1.44269504f)).nearest();
  R r = x;
  r.add_product(n, R::all(-0.693359375f));
  r.add_product(n, R::all(2.12194440e-4f));
  R p = R::all(1.9875691500e-4f);
  const float coefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                1.6666665459e-1f, 5.0000001201e-1f};
#pragma GCC unroll 5
  for (const float c : coefficients) {
    R next = R::all(c);
    next.add_product(p, r);
    p = next;
  }
  R result = r + R::all(1.0f);
  result.add_product(p, r * r);
  return result * n.power_of_two();
}

}  // namespace vlora::runtime::VLORA_ISA

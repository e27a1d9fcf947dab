// Functions on the registers of every instruction set: sums over lanes, and the exponential
// function. Included after an instruction set's register header.
#pragma once

#include "runtime/quad.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

VLORA_INLINE float sum_of(R a) { return a.folded().sum(); }

// Returns the sums over the lanes of four registers.
VLORA_INLINE Quad sums_of(R a, R b, R c, R d) {
  Quad s[4] = {a.folded(), b.folded(), c.folded(), d.folded()};
  Quad::transpose(s);
  return (s[0] + s[1]) + (s[2] + s[3]);
}

// Returns e to the power of x, to about 1.5 units in the last place. Below -87.3 it returns the
// smallest normal number, and above 88 the value at 88. A NaN stays a NaN.
VLORA_INLINE R exponential(R x) {
  // The bound is the first operand: if x is NaN, min and max return their second operand.
  x = max(R::all(-87.33f), min(R::all(88.0f), x));
  const R n = (x * R::all(1.44269504f)).nearest();
  // The remainder is x - n log 2. log 2 has two parts, so that the first product is exact.
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

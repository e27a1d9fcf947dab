// Functions that split fp32 values into the upper half of their bits, a bf16, and the rest.
#pragma once

#include <immintrin.h>

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

// Returns the upper halves of both registers: 16 bf16 of `a`, then 16 of `b`.
VLORA_INLINE __m512i upper_halves(__m512 a, __m512 b) {
  const __m512i odd =
      _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                       25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a), odd, _mm512_castps_si512(b));
}

// Returns each value less the upper half of its bits. This is exact. A value that is not finite
// becomes a NaN.
VLORA_INLINE __m512 without_upper_half(__m512 x) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u));
  return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper)));
}

}  // namespace vlora::runtime::VLORA_ISA

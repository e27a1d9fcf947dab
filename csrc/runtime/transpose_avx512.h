// Transposes lines of 16 fp32 values with AVX-512.
#pragma once

#include <immintrin.h>

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

// Returns columns 4 quarter … 4 quarter + 3 of 16 lines that are `stride` floats apart.
VLORA_INLINE void transpose_quarter(const float* lines, ptrdiff_t stride, int quarter,
                                    __m512 (&columns)[4]) {
  __m512 r[4];
  for (int i = 0; i < 4; ++i) {
    const float* const line = lines + i * stride + 4 * quarter;
    r[i] = _mm512_castps128_ps512(_mm_loadu_ps(line));
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(line + 4 * stride), 1);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(line + 8 * stride), 2);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(line + 12 * stride), 3);
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  columns[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  columns[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  columns[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  columns[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

}  // namespace vlora::runtime::VLORA_ISA

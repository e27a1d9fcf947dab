// Columns of lines of fp32 as lines, by AVX-512.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace vlora::runtime::VLORA_ISA {

// Columns 4 quarter … 4 quarter + 3 of 16 lines, `line` floats apart.
inline void turn(const float* lines, ptrdiff_t line, int quarter, __m512 (&out)[4]) {
  __m512 r[4];
  for (int i = 0; i < 4; ++i) {
    const float* const at = lines + i * line + 4 * quarter;
    r[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(at + 4 * line), 1);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(at + 8 * line), 2);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(at + 12 * line), 3);
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

}  // namespace vlora::runtime::VLORA_ISA

// Products of int4 with bytes of x by AVX-512 VNNI (dynamic_int4_rows.h). The integers of W are the
// unsigned bytes of the instruction.
#pragma once

#include "quantized/dynamic_int4.h"
#include "quantized/unpack_avx512.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int64_t kPrefetchedBytes = 1024;

struct Int4Bytes {
  // The sums of a group and of all groups fit in registers, with two of W and one of x.
  static constexpr int kTileRows = 12;
  using Sums = __m512i;
  using Part = __m512i;
  using Quad = __m512i;
  struct Line {
    __m512i half[2];  // of the bits of each byte
  };

  static VLORA_INLINE Line load(const uint8_t* w) {
    const __m512i both = _mm512_loadu_si512(w), low = _mm512_set1_epi8(15);
    return {{_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)}};
  }
  // Inline assembly, because GCC 12 copies and spills sums around the intrinsic.
  static VLORA_INLINE Quad quad(const char* x) {
    __m512i four;
    asm("vpbroadcastd %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const int32_t*>(x)));
    return four;
  }
  static VLORA_INLINE Sums zero() { return _mm512_setzero_si512(); }
  static VLORA_INLINE Part begin(const Sums& sums) { return sums; }
  static VLORA_INLINE void add(Part& sums, const Line& line, int half, Quad four) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(line.half[half]), "v"(four));
  }
  static VLORA_INLINE void end(Sums& sums, const Part& part) { sums = part; }
  static VLORA_INLINE V to_floats(const Sums& sums) { return {{{_mm512_cvtepi32_ps(sums)}}}; }
};

}  // namespace vlora::quantized::VLORA_ISA

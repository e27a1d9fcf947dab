// Products of bytes with AVX-512 VNNI (dynamic_vectors.h). The instruction multiplies unsigned with
// signed bytes, and its sums of four products do not saturate. 128 is added to each weight, which
// is an exclusive or, and the sums start at -128 times the sum of the integers of x.
#pragma once

#include <immintrin.h>

#include "quantized/dynamic.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

struct Bytes {
  // The sums of a group and of all groups fit in registers, with one of W and one of x.
  static constexpr int kTileRows = 12;
  static constexpr int64_t kLineBytes = kBlock;
  static constexpr bool kAddsOffsets = true;
  static constexpr int kParts = 1;
  static constexpr int64_t kAhead = 1024;  // see bytes_ahead
  using Weights = __m512i;
  using Quad = __m512i;
  using Sums = __m512i;

  static VLORA_INLINE void write_line(const int8_t* integers, char* line) {
    _mm512_storeu_si512(line, _mm512_loadu_si512(integers));
  }
  static VLORA_INLINE Sums initial(const int32_t* offset) { return _mm512_set1_epi32(*offset); }
  static VLORA_INLINE Weights load(const uint8_t* w, int) {
    return _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128));
  }
  // Inline assembly, because GCC 12 copies and spills sums around the intrinsic.
  static VLORA_INLINE Quad quad(const char* x, int) {
    __m512i four;
    asm volatile("vpbroadcastd %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const int32_t*>(x)));
    return four;
  }
  static VLORA_INLINE void add(Sums& sums, Weights weights, Quad four) {
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(four));
  }
  static VLORA_INLINE V to_floats(Sums sums) { return {{{_mm512_cvtepi32_ps(sums)}}}; }
  static VLORA_INLINE void keep(const __m512i&) {}  // nothing removes inline assembly
};

}  // namespace vlora::quantized::VLORA_ISA

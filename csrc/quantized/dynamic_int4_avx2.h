// Products of int4 with bytes of x by AVX2 (dynamic_int4_rows.h). Sums of 32 products stay in 16
// bits. They cannot saturate: the instruction adds two products of at most 15 * 127, and eight of
// its results are at most 30480.
#pragma once

#include <cstring>

#include "quantized/dynamic_int4.h"
#include "quantized/unpack_avx2.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int64_t kPrefetchedBytes = 1024;
static_assert(kMinGroup / 4 * 2 * 15 * 127 <= INT16_MAX);

struct Int4Bytes {
  static constexpr int kTileRows = 6;
  using Quad = __m256i;
  struct Sums {
    __m256i of[2];  // of 8 outputs each, in 32 bits
  };
  struct Part {
    __m256i of[2];  // of 8 outputs each, in pairs of 16 bits
  };
  struct Line {
    __m256i half[2][2];  // of the bits of each byte, by outputs
  };

  static VLORA_INLINE Line load(const uint8_t* w) {
    const __m256i low = _mm256_set1_epi8(15);
    Line line;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + i);
      line.half[0][i] = _mm256_and_si256(both, low);
      line.half[1][i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    return line;
  }
  static VLORA_INLINE Quad quad(const char* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static VLORA_INLINE Sums zero() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
  static VLORA_INLINE Part begin(const Sums&) {
    return {{_mm256_setzero_si256(), _mm256_setzero_si256()}};
  }
  static VLORA_INLINE void add(Part& sums, const Line& line, int half, const Quad& four) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i products = _mm256_maddubs_epi16(line.half[half][i], four);
      // Inline assembly, because GCC 12 would compute all products first, and spill them.
      asm volatile("vpaddw %1, %0, %0" : "+x"(sums.of[i]) : "x"(products));
    }
  }
  static VLORA_INLINE void end(Sums& sums, const Part& part) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
      sums.of[i] =
          _mm256_add_epi32(sums.of[i], _mm256_madd_epi16(part.of[i], _mm256_set1_epi16(1)));
  }
  static VLORA_INLINE V to_floats(const Sums& sums) {
    return {{{_mm256_cvtepi32_ps(sums.of[0])}, {_mm256_cvtepi32_ps(sums.of[1])}}};
  }
};

}  // namespace vlora::quantized::VLORA_ISA

// Products of bytes with AVX2 (dynamic_vectors.h). Bytes are widened to 16 bits, because the
// instruction for bytes saturates.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "quantized/dynamic.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

struct Bytes {
  static constexpr int kTileRows = 6;
  // A line has values 0 and 2 of four, then 1 and 3, as 16 bits.
  static constexpr int64_t kLineBytes = 2 * kBlock;
  static constexpr bool kAddsOffsets = false;
  static constexpr int kParts = 2;  // of pairs: registers hold the sums and one part of W and x
  // On Zen 3, one row takes 0.95 of the time that it takes with 1024, and 0.9 of that with 4096.
  static constexpr int64_t kAhead = 2048;  // see bytes_ahead
  struct Weights {
    __m256i half[2];  // of 8 outputs each
  };
  using Quad = __m256i;
  struct Sums {
    __m256i half[2];
  };

  static void write_line(const int8_t* integers, char* line) {
    int16_t wide[kBlock];
    for (int i = 0; i < kBlock; i += 4)
      for (int k = 0; k < 4; ++k) wide[i + k] = integers[i + 2 * (k % 2) + k / 2];
    std::memcpy(line, wide, sizeof wide);
  }
  static VLORA_INLINE Sums initial(const int32_t*) {
    return {{_mm256_setzero_si256(), _mm256_setzero_si256()}};
  }
  static VLORA_INLINE Weights load(const uint8_t* w, int part) {
    Weights weights;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + i);
      if (part == 0) bytes = _mm256_slli_epi16(bytes, 8);
      weights.half[i] = _mm256_srai_epi16(bytes, 8);
    }
    return weights;
  }
  static VLORA_INLINE Quad quad(const char* x, int part) {
    const auto* const pair = reinterpret_cast<const float*>(x) + part;
    return _mm256_castps_si256(_mm256_broadcast_ss(pair));
  }
  static VLORA_INLINE void add(Sums& sums, const Weights& weights, const Quad& pair) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i products = _mm256_madd_epi16(weights.half[i], pair);
      // Inline assembly, because GCC 12 would add the products of both parts first, and spill sums.
      asm volatile("vpaddd %1, %0, %0" : "+x"(sums.half[i]) : "x"(products));
    }
  }
  static VLORA_INLINE V to_floats(const Sums& sums) {
    return {{{_mm256_cvtepi32_ps(sums.half[0])}, {_mm256_cvtepi32_ps(sums.half[1])}}};
  }
  // Both keep the compiler from removing computations.
  static VLORA_INLINE void keep(Sums& sums) {
    asm volatile("" : "+x"(sums.half[0]), "+x"(sums.half[1]));
  }
  static VLORA_INLINE void keep(Weights& w) { asm volatile("" : "+x"(w.half[0]), "+x"(w.half[1])); }
};

}  // namespace vlora::quantized::VLORA_ISA

// Int8 and int4 weights to one AVX-512 register of fp32.
#pragma once

#include <immintrin.h>

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

VLORA_INLINE R load_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// Returns x in the lanes in which a < b, and y in the others.
VLORA_INLINE R where_less(R a, R b, R x, R y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.r, b.r, _CMP_LT_OQ), y.r, x.r)};
}

// Returns scale times stored zero for `count` groups, at most kWidth, and 0 in the other lanes.
VLORA_INLINE R scaled_zeros(const float* scales, const int8_t* zeros, int count) {
  const auto lanes = __mmask16((1u << count) - 1);
  const R values{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, zeros)))};
  return values * R::load_some(scales, count);
}

// A table of scale * (value - zero) for the 16 values of four bits.
struct Factors {
  R table;
  static VLORA_INLINE Factors of(float scale, float zero) {
    const R values{_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
    return {(values - R::all(zero)) * R::all(scale)};
  }
};

// The 64 values of a block.
struct Nibbles {
  __m512i words;
  static VLORA_INLINE Nibbles load(const uint8_t* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  // Returns weights 16 step … 16 step + 15: the four lowest bits of a lane select from the table.
  VLORA_INLINE R weights(const Factors& factors, int step) const {
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, unsigned(4 * step)), factors.table.r)};
  }
};

#ifdef VLORA_HAS_BF16_PRODUCTS
// Rounds to 32 bf16, in order.
VLORA_INLINE R::Pairs pairs_of(R first, R second) { return _mm512_cvtne2ps_pbh(second.r, first.r); }

// The table in bf16, twice: the five lowest bits of a lane select from 32 entries, and the fifth
// bit belongs to another value.
struct FactorPairs {
  __m512i table;
  static VLORA_INLINE FactorPairs of(const Factors& factors) {
    return {__m512i(pairs_of(factors.table, factors.table))};
  }
};

// The 64 values of a block in each half of the register. The halves are shifted differently.
struct NibblePairs {
  __m512i words;
  static VLORA_INLINE NibblePairs load(const uint8_t* p) {
    return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  // Returns weights 32 step … 32 step + 31.
  VLORA_INLINE R::Pairs weights(const FactorPairs& factors, int step) const {
    const __m256i low = _mm256_set1_epi16(int16_t(8 * step)),
                  high = _mm256_set1_epi16(int16_t(8 * step + 4));
    const __m512i shifts = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return R::Pairs(_mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts), factors.table));
  }
};
#endif

}  // namespace vlora::quantized::VLORA_ISA

// Int8 weights, and the integers of int4 in panels, as lines of bf16 tiles.
#pragma once

#include "quantized/quantized.h"
#include "quantized/unpack_avx512.h"

namespace vlora::quantized::VLORA_ISA {

// Returns the upper halves of the values in turn: the first of `even`, the first of `odd`, and so
// on.
VLORA_INLINE __m512i alternating_upper_halves(__m512i even, __m512i odd) {
  constexpr int kFirstOrBoth = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(even, 16), odd,
                                   _mm512_set1_epi32(int(0xffff0000u)), kFirstOrBoth);
}

// Int8 with scales of groups, or with one scale for each output. `write` writes the weights of
// `count` blocks of a row, from `block` on, as lines of 32 values that are `tile_bytes` apart.
// kIntegers: it writes the integers, and the sums are multiplied by the only scale of the row.
// kInterleaved: the values of a line are in the order of Bf16Line::interleaved(), as those of x.

template <bool grouped>
struct Int8Lines {
  static constexpr bool kIntegers = !grouped, kInterleaved = !grouped;
  static VLORA_INLINE void write(const Weight w, int64_t row, int64_t block, int64_t count,
                                 int64_t ahead, char* to, ptrdiff_t tile_bytes) {
    const auto* values =
        reinterpret_cast<const int8_t*>(w.values + row * w.row_bytes() + block * kBlock);
    const float* const scales = w.scales + row * w.groups();
    const int64_t values_ahead = ahead * w.row_bytes();
    for (int64_t k = block * kBlock; count > 0; --count) {
      __builtin_prefetch(values + values_ahead, 0, 2);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part, k += kMinGroup, to += tile_bytes, values += kMinGroup) {
        const R low = load_bytes(values), high = load_bytes(values + R::kWidth);
        if constexpr (grouped) {
          const R scale = R::all(scales[k >> w.group_shift]);
          _mm512_store_si512(to, __m512i(pairs_of(low * scale, high * scale)));
        } else {
          // The upper halves hold all bits of small integers.
          _mm512_store_si512(to, alternating_upper_halves(_mm512_castps_si512(low.r),
                                                          _mm512_castps_si512(high.r)));
        }
      }
    }
  }
};

// The 16 values of an int4 integer less kMiddle, in bf16.
class IntegerTable {
 public:
  VLORA_INLINE IntegerTable() {
    // Each value twice: five bits select an entry, and the fifth bit belongs to another value.
    const __m512i values = _mm512_castps_si512(
        _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                      _mm512_set1_ps(kMiddle)));
    const __m256i upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32(values, 16));
    table_ = _mm512_broadcast_i64x4(upper);
  }
  // Converts 64 bytes of a panel to four lines of a tile, which have a pair of each row.
  VLORA_INLINE void convert(const uint8_t* from, char* to) const {
    const __m512i words = _mm512_loadu_si512(from);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      _mm512_store_si512(
          to + 64 * i, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, unsigned(4 * i)), table_));
  }
  // The same for the weights scale * integer + offset of each row, rounded to bf16, ties away from
  // zero.
  VLORA_INLINE void convert_scaled(const uint8_t* from, const float* scales, const float* offsets,
                                   char* to) const {
    const __m512i words = _mm512_loadu_si512(from), half = _mm512_set1_epi32(0x8000);
    const __m512 scale = _mm512_loadu_ps(scales), offset = _mm512_loadu_ps(offsets);
    const auto weights = [&](__m512i integers) __attribute__((always_inline)) {
      const __m512 exact = _mm512_fmadd_ps(_mm512_castsi512_ps(integers), scale, offset);
      return _mm512_add_epi32(_mm512_castps_si512(exact), half);
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i pairs =
          _mm512_permutexvar_epi16(_mm512_srli_epi16(words, unsigned(4 * i)), table_);
      const __m512i upper = _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u)));
      const __m512i lower = _mm512_slli_epi32(pairs, 16);
      _mm512_store_si512(to + 64 * i, alternating_upper_halves(weights(lower), weights(upper)));
    }
  }

 private:
  __m512i table_;
};

}  // namespace vlora::quantized::VLORA_ISA

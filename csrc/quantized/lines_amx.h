// Int8 and int4 weights as lines of bf16 tiles.
#pragma once

#include "quantized/quantized.h"
#include "quantized/unpack_avx512.h"

namespace vlora::quantized::VLORA_ISA {

// Types for each kind of weight. `write` writes the weights of `count` blocks of a row, from
// `block` on, as lines of 32 values that are `tile_bytes` apart.
// kIntegers: it writes the integers, and the sums are multiplied by the only scale of the row.
// kInterleaved: the values of a line are in the order of Bf16Line::interleaved(), as those of x.

struct Int4Lines {
  static constexpr bool kIntegers = false, kInterleaved = false;
  static VLORA_INLINE void write(const Weight w, int64_t row, int64_t block, int64_t count,
                                 int64_t ahead, char* to, ptrdiff_t tile_bytes) {
    const uint8_t* values = w.values + row * w.row_bytes() + block * kBlock / 2;
    const int64_t k = block * kBlock, group = row * w.groups() + (k >> w.group_shift),
                  groups = ((k + count * kBlock - 1) >> w.group_shift) - (k >> w.group_shift) + 1;
    const float* scale = w.scales + group;
    alignas(64) float offsets[R::kWidth];
    offsets_of(w, group, int(groups)).store(offsets);
    const float* offset = offsets;
    const int64_t values_ahead = ahead * w.row_bytes();
    __builtin_prefetch(scale + ahead * w.groups(), 0, 2);
    if (w.zeros) __builtin_prefetch(w.zeros + group + ahead * w.groups(), 0, 2);
    const R integers{_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
    // Lines that share a scale, and those of the first group that belong to earlier blocks.
    const int64_t lines = (int64_t(1) << w.group_shift) / kMinGroup;
    int64_t left = 0, earlier = k / kMinGroup & (lines - 1);
    __m512i table{};
    for (; count > 0; --count, values += kBlock / 2) {
      __builtin_prefetch(values + values_ahead, 0, 2);
      const __m512i words =
          _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part, to += tile_bytes) {
        if (left-- == 0) {
          R weights = R::all(*offset++);
          weights.add_product(integers, R::all(*scale++));
          table = rounded_twice(weights);
          left = lines - 1 - earlier;
          earlier = 0;
        }
        _mm512_store_si512(to, _mm512_permutexvar_epi16(indices(words, part), table));
      }
    }
  }

 private:
  // Returns -scale * zero of `count` groups, at most kWidth.
  static VLORA_INLINE R offsets_of(const Weight& w, int64_t group, int count) {
    R offsets = R::load_some(w.scales + group, count) * R::all(-kMiddle);
    if (w.zeros)
      offsets.add_product(scaled_zeros(w.scales + group, w.zeros + group, count),
                          R::all(-kZeroStep));
    return offsets;
  }
  // Rounds 16 values to bf16, ties away from zero, and stores each twice. This takes fewer
  // operations than the instruction that rounds two registers, ties to even.
  static VLORA_INLINE __m512i rounded_twice(R values) {
    const __m512i upper = _mm512_broadcast_i32x4(
        _mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
    const __m512i half = _mm512_set1_epi32(0x8000);
    return _mm512_shuffle_epi8(_mm512_add_epi32(_mm512_castps_si512(values.r), half), upper);
  }
  // Rotates the integers 32 part … 32 part + 31 of a block, both halves of the register, to bits 1
  // to 4 of the words. The lowest bit selects one of two equal entries of a table.
  static VLORA_INLINE __m512i indices(__m512i words, int part) {
    const __m256i low = _mm256_set1_epi32(part ? 7 : 31), high = _mm256_set1_epi32(part ? 11 : 3);
    return _mm512_rorv_epi32(words, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
};

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
          _mm512_store_si512(to, alternating_upper_halves(low, high));
        }
      }
    }
  }

 private:
  // Returns the upper halves of the values, which hold all bits of small integers, in turn.
  static VLORA_INLINE __m512i alternating_upper_halves(R even, R odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.r), 16);
    constexpr int kFirstOrBoth = 0xf8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd.r),
                                     _mm512_set1_epi32(int(0xffff0000u)), kFirstOrBoth);
  }
};

}  // namespace vlora::quantized::VLORA_ISA

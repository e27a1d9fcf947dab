// Products with int4 weights in panels of 16 rows by AVX-512 VNNI, and the conversion of such
// weights in memory.
//
// The instruction multiplies four unsigned bytes with four signed ones in each lane, and adds the
// products to 32 bits. The stored integers of W are the unsigned bytes; each lane belongs to a row
// of the panel. The signed bytes are digits of x: each kMinGroup values of a row of x are
// multiplied by a factor of their own, and become integers of some bytes. All sums of a group are
// exact.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "quantized/digits.h"
#include "quantized/digits_avx512.h"
#include "quantized/unpack_avx512.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int kGroup = int(kMinGroup), kRowsOfPanel = int(kTilePanelRows);
// Bytes of a group of a panel, in four lines. Four bits of each byte of a line make one operand,
// the other four bits another.
constexpr int kGroupBytes = kRowsOfPanel * kGroup / 2, kLinesOfGroup = 4;
constexpr int kParts = 2 * kLinesOfGroup;
static_assert(kRowsOfPanel == kLanes && kGroupBytes == 64 * kLinesOfGroup);
// Bytes that the values, scales and zeros of W are prefetched ahead, into L1.
constexpr int64_t kValuesAhead = 2048, kScalesAhead = 1024, kZerosAhead = 256;

// What a group of a row of x has besides its digits.
struct GroupFactors {
  // Minus kMiddle times the sum of the integers, for the sums of the two lower digits, and for
  // those of the digits above.
  int32_t lower, upper;
  float unit;       // of the integers
  float zero_term;  // minus kZeroStep times the sum of the integers
};

// A tile of x has the groups of all its rows after another: their digits, then their factors. The
// digits of a group are kParts times kDigits words of four bytes: the digits of four values, the
// lowest ones first, then those of the next four.
template <int kDigits>
constexpr int64_t kDigitBytes = 4 * kParts * kDigits;
inline int64_t packed_row_bytes(const Weight& w, int digits) {
  return w.blocks() * (kBlock / kGroup) * (4 * kParts * digits + int64_t(sizeof(GroupFactors)));
}

// The values of x for one group, in the order of the words of digits.
struct GroupOfX {
  __m512 low, high;

  // Reads `count` values and sets the others to zero.
  static VLORA_INLINE GroupOfX load(const float* x, int64_t count) {
    // A line has eight values of each row. Bits 4j to 4j + 3 of its two words of 16 bits are values
    // 2j and 2j + 1.
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const auto half = [&](int64_t from) __attribute__((always_inline)) {
      return _mm512_permutexvar_ps(order, load_values(x + from, count - from));
    };
    return {half(0), half(16)};
  }
  // Returns the largest magnitude, or NaN if a value is NaN.
  VLORA_INLINE float largest() const {
    return largest_of(larger_magnitudes(larger_magnitudes(_mm512_setzero_si512(), low), high));
  }
  // Returns how many values have a magnitude below `limit` and are not zero.
  VLORA_INLINE int smaller(float limit) const {
    return count_smaller(low, limit) + count_smaller(high, limit);
  }
};

// Returns the fewest digits with which `multiply_panel_digits` is about as exact as the type of the
// product, except for a few small values of each row, or 0. Groups with values that are not finite
// are not considered, because they spoil the product of their row anyway.
inline int digits_for_panels(const Product& p, Dtype dtype) {
  int digits = dtype == Dtype::kBf16 ? kMinDigits : kMinDigits + 1;
  for (int64_t t = 0; t < p.rows; ++t) {
    const float* const x = p.x + t * p.x_stride;
    int64_t small[kMaxDigits + 1] = {};
    for (int64_t k = 0; k < p.w.k; k += kGroup) {
      const GroupOfX group = GroupOfX::load(x + k, p.w.k - k);
      const float largest = group.largest();
      if (!(largest < INFINITY)) continue;
      for (int each = digits; each <= kMaxDigits; ++each)
        small[each] += group.smaller(std::max(largest, kSmallestMaximum) *
                                     (error_of_largest(each) / kMaxError[int(dtype)]));
    }
    while (digits <= kMaxDigits && kMaxSmallShare * small[digits] > p.w.k) ++digits;
    if (digits > kMaxDigits) return 0;
  }
  return digits;
}

// Packs the digits and factors of one group of a row.
template <int kDigits>
VLORA_INLINE void pack_group(const GroupOfX& x, char* digits, GroupFactors& factors) {
  const float largest = x.largest();
  const bool finite = largest < INFINITY;  // false for NaN
  const float unit = std::max(largest, kSmallestMaximum) / largest_integer(kDigits);
  const __m512 scale = _mm512_set1_ps(1 / unit);
  const __mmask16 used = finite ? 0xffff : 0;
  constexpr int kLowerDigits = std::min(kDigits, 2);
  constexpr auto kWords = __mmask16(kDigits == 4 ? 0xffff : kDigits == 3 ? 0x7777 : 0x3333);
  __m512i upper = _mm512_setzero_si512(), lower = _mm512_setzero_si512();
  const auto half = [&](__m512 values, char* to) __attribute__((always_inline)) {
    const __m512i integers = _mm512_maskz_cvtps_epi32(used, _mm512_mul_ps(values, scale));
    const __m512i above =
        _mm512_srai_epi32(_mm512_add_epi32(integers, _mm512_set1_epi32(0x8080)), 8 * kLowerDigits);
    if constexpr (kDigits > kLowerDigits) {
      upper = _mm512_add_epi32(upper, above);
      lower = _mm512_add_epi32(
          lower, _mm512_sub_epi32(integers, _mm512_slli_epi32(above, 8 * kLowerDigits)));
    } else {
      lower = _mm512_add_epi32(lower, integers);
    }
    const __m512i words = _mm512_maskz_compress_epi32(kWords, split_integers<kDigits>(integers));
    constexpr auto kStored = __mmask16((1u << (4 * kDigits)) - 1);
    _mm512_mask_storeu_epi32(to, kStored, words);
  };
  half(x.low, digits);
  half(x.high, digits + kDigitBytes<kDigits> / 2);
  const int upper_sum = _mm512_reduce_add_epi32(upper), lower_sum = _mm512_reduce_add_epi32(lower);
  factors.lower = -int(kMiddle) * lower_sum;
  factors.upper = -int(kMiddle) * upper_sum;
  factors.unit = finite ? unit : NAN;
  factors.zero_term =
      -kZeroStep * float(double(upper_sum) * (1 << 8 * kLowerDigits) + double(lower_sum));
}

// Packs x in tiles of up to kMaxDigitTile rows.
template <int kDigits>
void pack_digits_of_panels(const Product& p, char* to) {
  const int64_t tiles = ceil_div(p.rows, kMaxDigitTile), groups = p.w.blocks() * (kBlock / kGroup);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t from = p.rows * tile / tiles, rows = p.rows * (tile + 1) / tiles - from;
    for (int64_t k = 0; k < groups * kGroup; k += kGroup) {
      auto* const factors = reinterpret_cast<GroupFactors*>(to + rows * kDigitBytes<kDigits>);
      for (int64_t row = 0; row < rows; ++row)
        pack_group<kDigits>(GroupOfX::load(p.x + (from + row) * p.x_stride + k, p.w.k - k),
                            to + row * kDigitBytes<kDigits>, factors[row]);
      to = reinterpret_cast<char*>(factors + rows);
    }
  }
}

VLORA_INLINE __m512i broadcast_word(const char* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// Returns the sums of the products of kCount digits, from kFirst on, of a group with the integers
// of W less kMiddle. correction: minus kMiddle times the sum of these digits.
template <int kDigits, int kFirst, int kCount>
VLORA_INLINE __m512 sums_of_digits(const __m512i (&w)[kParts], const char* x, int32_t correction) {
  __m512i sums[kCount] = {_mm512_set1_epi32(correction)};
#pragma GCC unroll 8
  for (int part = 0; part < kParts; ++part)
#pragma GCC unroll 2
    for (int i = 0; i < kCount; ++i)
      sums[i] = _mm512_dpbusd_epi32(sums[i], w[part],
                                    broadcast_word(x + 4 * (part * kDigits + kFirst + i)));
  if constexpr (kCount == 2) sums[0] = _mm512_add_epi32(sums[0], _mm512_slli_epi32(sums[1], 8));
  return _mm512_cvtepi32_ps(sums[0]);
}

// Multiplies a panel with a tile of kRows rows of x.
template <int kDigits, int kRows, bool kZeros>
VLORA_INLINE void multiply_panel_digits(const Product& p, int64_t panel, const char* x,
                                        int64_t row) {
  const Weight& w = p.w;
  const int64_t groups = w.blocks() * (kBlock / kGroup);
  const int shift = w.group_shift - 5;
  const uint8_t* values = w.values + panel * kRowsOfPanel * w.row_bytes();
  const float* const scales = w.scales + panel * kRowsOfPanel * w.groups();
  const int8_t* const zeros = kZeros ? w.zeros + panel * kRowsOfPanel * w.groups() : nullptr;
  const __m512i low_bits = _mm512_set1_epi8(15);
  __m512 totals[kRows];
#pragma GCC unroll 8
  for (int t = 0; t < kRows; ++t)
    totals[t] = p.bias ? _mm512_loadu_ps(p.bias + panel * kRowsOfPanel) : _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; ++group, values += kGroupBytes) {
    __m512i parts[kParts];
#pragma GCC unroll 4
    for (int line = 0; line < kLinesOfGroup; ++line) {
      __builtin_prefetch(values + 64 * line + kValuesAhead, 0, 3);
      const __m512i both = _mm512_loadu_si512(values + 64 * line);
      parts[2 * line] = _mm512_and_si512(both, low_bits);
      parts[2 * line + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
    }
    const int64_t index = (group >> shift) * kRowsOfPanel;
    __builtin_prefetch(scales + index + kScalesAhead / 4, 0, 3);
    const __m512 scale = _mm512_loadu_ps(scales + index);
    __m512 zero = _mm512_setzero_ps();
    if constexpr (kZeros) {
      __builtin_prefetch(zeros + index + kZerosAhead, 0, 3);
      zero = load_bytes(zeros + index).r;
    }
    const auto* const factors =
        reinterpret_cast<const GroupFactors*>(x + kRows * kDigitBytes<kDigits>);
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t, x += kDigitBytes<kDigits>) {
      __m512 sum = sums_of_digits<kDigits, 0, 2>(parts, x, factors[t].lower);
      if constexpr (kDigits > 2)
        sum = _mm512_fmadd_ps(sums_of_digits<kDigits, 2, kDigits - 2>(parts, x, factors[t].upper),
                              _mm512_set1_ps(1 << 16), sum);
      if constexpr (kZeros) sum = _mm512_fmadd_ps(zero, _mm512_set1_ps(factors[t].zero_term), sum);
      totals[t] =
          _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(factors[t].unit)), scale, totals[t]);
    }
    x = reinterpret_cast<const char*>(factors + kRows);
  }
#pragma GCC unroll 8
  for (int t = 0; t < kRows; ++t)
    _mm512_storeu_ps(p.y + (row + t) * p.y_stride + panel * kRowsOfPanel, totals[t]);
}

// Multiplies a panel with a tile of `rows` rows of x, at most kRows.
template <int kDigits, bool kZeros, int kRows = int(kMaxDigitTile)>
VLORA_INLINE void multiply_panel_tile(const Product& p, int64_t panel, const char* x, int64_t row,
                                      int64_t rows) {
  if (rows == kRows) return multiply_panel_digits<kDigits, kRows, kZeros>(p, panel, x, row);
  if constexpr (kRows > 1) multiply_panel_tile<kDigits, kZeros, kRows - 1>(p, panel, x, row, rows);
}

// Multiplies panels [from, to) of W with packed x.
template <int kDigits, bool kZeros>
void multiply_panels_of_digits(const Product& p, const char* x, int64_t from, int64_t to) {
  const int64_t tiles = ceil_div(p.rows, kMaxDigitTile), bytes = packed_row_bytes(p.w, kDigits);
  for (int64_t panel = from; panel < to; ++panel)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = p.rows * tile / tiles, rows = p.rows * (tile + 1) / tiles - row;
      multiply_panel_tile<kDigits, kZeros>(p, panel, x + row * bytes, row, rows);
    }
}

template <int kDigits>
void gemm_digits_of_panels(const Product& p, const char* x, int64_t from, int64_t to) {
  if (p.w.zeros)
    multiply_panels_of_digits<kDigits, true>(p, x, from, to);
  else
    multiply_panels_of_digits<kDigits, false>(p, x, from, to);
}

// Writes rows [from, to) of W, which are whole panels, to `out`, k values apart.
template <class Out>
void widen_tile_panels(const Weight& w, int64_t from, int64_t to, void* to_rows) {
  // Bits of value i of a line, in the 32 bits of a row.
  const __m512i shifts =
      _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28);
  const int64_t shift = w.group_shift - 5;
  for (int64_t n = from; n < to; ++n) {
    auto* const out = static_cast<Out*>(to_rows) + (n - from) * w.k;
    const int64_t panel = n / kRowsOfPanel, row = n % kRowsOfPanel;
    const uint8_t* values = w.values + panel * kRowsOfPanel * w.row_bytes() + 4 * row;
    const int64_t first = panel * kRowsOfPanel * w.groups() + row;
    for (int64_t k = 0; k < w.k; k += kGroup, values += kGroupBytes) {
      const int64_t index = first + (k / kGroup >> shift) * kRowsOfPanel;
      const Factors factors = Factors::of(w.scales[index], w.zeros ? w.zero(index) : kMiddle);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        int words[2];
        __builtin_memcpy(&words[0], values + 128 * half, 4);
        __builtin_memcpy(&words[1], values + 128 * half + 64, 4);
        const __m512i both =
            _mm512_inserti64x4(_mm512_set1_epi32(words[0]), _mm256_set1_epi32(words[1]), 1);
        const R weights{_mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), factors.table.r)};
        const int64_t at = k + 16 * half, count = w.k - at;
        if (count >= 16)
          weights.store(out + at);
        else if (count > 0)
          weights.store_some(out + at, int(count));
      }
    }
  }
}

inline PanelDigits panel_digits_of_vectors() {
  return {packed_row_bytes,
          digits_for_panels,
          {pack_digits_of_panels<2>, pack_digits_of_panels<3>, pack_digits_of_panels<4>},
          {gemm_digits_of_panels<2>, gemm_digits_of_panels<3>, gemm_digits_of_panels<4>},
          {widen_tile_panels<float>, widen_tile_panels<uint16_t>}};
}

}  // namespace vlora::quantized::VLORA_ISA

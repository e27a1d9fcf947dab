// Gemv of int8 weights with one scale for each output, multiplied by digits of x
// (digits_of_rows.h) with AVX-512 VNNI.
//
// The instruction multiplies unsigned with signed bytes. 128 is added to each weight, which is an
// exclusive or. The sums start at -128 times the sums of the digits, so they are exact.
//
// Packed x has the factors of the rows, in whole registers, and then the tiles. A tile has one line
// of each digit of each of its rows after another: first the initial sums, then the digits of each
// block of depth.
#pragma once

#include "quantized/digits_of_rows.h"
#include "quantized/gemv_quantized.h"

namespace vlora::quantized::VLORA_ISA {

// Digits of x as a factor of a gemv. The sums of a tile fill up to 24 registers.
template <int kDigits>
struct DigitsOfX {
  static constexpr int kTileRows = 12 / kDigits;
  static constexpr int streams(int rows) { return rows * kDigits <= 6 ? kStreams : 2; }
};

// Returns the offset in bytes of the tile of packed x that begins with row t0.
template <int kDigits>
int64_t tile_offset(const Product& p, int64_t t0) {
  return padded_factors(p) * 4 + t0 * (p.w.blocks() + 1) * kDigits * kBlock;
}

// The row of x of each lane of a register with the products of a tile of T rows.
template <int T>
struct alignas(64) RowsOfLanes {
  int32_t rows[kLanes];
  constexpr RowsOfLanes() : rows() {
    for (int i = 0; i < kLanes; ++i) rows[i] = i % T;
  }
};

// Splits a block of values of x, of which those from `count` on are zero, into a register of each
// digit.
template <int kDigits>
VLORA_INLINE void split_block(const float* x, int64_t count, float scale,
                              __m512i (&digits)[kDigits]) {
  __m512i groups[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) groups[i] = digits_of<kDigits>(x + 16 * i, count - 16 * i, scale);
#pragma GCC unroll 2
  for (int digit = 0; digit < kDigits; digit += 2) {
    // Each half of a register gets one of two digits.
    const __m512i order = _mm512_add_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29),
        _mm512_set1_epi32(digit));
    const __m512i low = _mm512_permutex2var_epi32(groups[0], order, groups[1]),
                  high = _mm512_permutex2var_epi32(groups[2], order, groups[3]);
    digits[digit] = _mm512_shuffle_i64x2(low, high, 0x44);
    if (digit + 1 < kDigits) digits[digit + 1] = _mm512_shuffle_i64x2(low, high, 0xee);
  }
}

template <int kDigits>
void pack_digits_of_x(const Product& p, void* to) {
  using P = DigitsOfX<kDigits>;
  for (int64_t tile = 0; tile < ceil_div(p.rows, P::kTileRows); ++tile) {
    const int64_t begin = tile_begin<P>(p.rows, tile), end = tile_begin<P>(p.rows, tile + 1);
    for (int64_t t = begin; t < end; ++t) {
      const float* const x = p.x + t * p.x_stride;
      const RowScale row = row_scale<kDigits>(x, p.w.k);
      static_cast<float*>(to)[t] = row.factor;
      char* const initial =
          static_cast<char*>(to) + tile_offset<kDigits>(p, begin) + (t - begin) * kDigits * kBlock;
      char* out = initial;
      __m512i sums[kDigits] = {};
      for (int64_t k = 0; k < p.w.k; k += kBlock) {
        __m512i digits[kDigits];
        split_block<kDigits>(x + k, p.w.k - k, row.scale, digits);
        out += (end - begin) * kDigits * kBlock;
#pragma GCC unroll 4
        for (int i = 0; i < kDigits; ++i) {
          sums[i] = _mm512_dpbusd_epi32(sums[i], _mm512_set1_epi8(-128), digits[i]);
          _mm512_storeu_si512(out + i * kBlock, digits[i]);
        }
      }
      const __m512i zero = _mm512_setzero_si512();
      for (int i = 0; i < kDigits; ++i)
        _mm512_storeu_si512(initial + i * kBlock, _mm512_sub_epi32(zero, sums[i]));
    }
  }
}

// Returns the sum of the lanes of each register. The lanes from kCount on are undefined.
template <int kCount>
VLORA_INLINE __m512 sums_of_lanes(const __m512 (&registers)[kCount]) {
  static_assert(kCount <= kLanes);
  const auto halves = [&](int i) __attribute__((always_inline)) {
    const __m512 a = registers[i % kCount], b = registers[(i + 4) % kCount];
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  // Quarter q of register i has four partial sums of register 4 q + i.
  const auto quarters = [&](int i) __attribute__((always_inline)) {
    const __m512 a = halves(i), b = halves(i + 8);
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  const auto pairs = [&](int i) __attribute__((always_inline)) {
    const __m512 a = quarters(i), b = quarters(i + 1);
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  const __m512 a = pairs(0), b = pairs(2);
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

// These functions are inline assembly, because GCC 12 copies and spills sums around the intrinsic,
// and also if it may load digits earlier.
VLORA_INLINE __m512i load_digits(const char* x) {
  __m512i digits;
  asm volatile("vmovdqu64 %1, %0" : "=v"(digits) : "m"(*reinterpret_cast<const __m512i*>(x)));
  return digits;
}
// Adds the products of unsigned with signed bytes, four to each lane.
VLORA_INLINE void add_products(__m512i& sums, __m512i weights, __m512i digits) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(digits));
}

template <int N, int T, int kDigits>
VLORA_INLINE void gemv_tile(DigitsOfX<kDigits>, const Product& p, const void* packed, int64_t row,
                            int64_t gap, int64_t t0) {
  static constexpr RowsOfLanes<T> kRows;
  const char* x = static_cast<const char*>(packed) + tile_offset<kDigits>(p, t0);
  const uint8_t* values[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) values[n] = p.w.values + (row + n * gap) * p.w.row_bytes();
  __m512i sums[N][T][kDigits];
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
    for (int i = 0; i < kDigits; ++i, x += kBlock)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n][t][i] = _mm512_loadu_si512(x);
  for (int64_t k = 0; k < p.w.k; k += kBlock) {
    __m512i weights[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      __builtin_prefetch(values[n] + kPrefetchBytes, 0, 3);
      weights[n] = _mm512_xor_si512(_mm512_loadu_si512(values[n]), _mm512_set1_epi8(-128));
      values[n] += kBlock;
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int i = 0; i < kDigits; ++i, x += kBlock) {
        const __m512i digits = load_digits(x);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) add_products(sums[n][t][i], weights[n], digits);
      }
  }
  // Lane n T + t has row t of x and row n of W.
  __m512 combined[N * T];
  __m512 scales = _mm512_set1_ps(p.w.scales[row]),
         biases = _mm512_set1_ps(p.bias ? p.bias[row] : 0);
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const auto lanes = __mmask16(((1 << T) - 1) << n * T);
    scales = _mm512_mask_mov_ps(scales, lanes, _mm512_set1_ps(p.w.scales[row + n * gap]));
    if (p.bias) biases = _mm512_mask_mov_ps(biases, lanes, _mm512_set1_ps(p.bias[row + n * gap]));
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      __m512 sum = _mm512_cvtepi32_ps(sums[n][t][kDigits - 1]);
#pragma GCC unroll 3
      for (int i = kDigits - 2; i >= 0; --i)
        sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256), _mm512_cvtepi32_ps(sums[n][t][i]));
      combined[n * T + t] = sum;
    }
  }
  const __m512 factors = _mm512_permutexvar_ps(
      _mm512_load_si512(kRows.rows), _mm512_loadu_ps(static_cast<const float*>(packed) + t0));
  alignas(64) float products[kLanes];
  _mm512_store_ps(products,
                  _mm512_fmadd_ps(_mm512_mul_ps(sums_of_lanes(combined), scales), factors, biases));
  float* y = p.y + t0 * p.y_stride + row;
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t, y += p.y_stride)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) y[n * gap] = products[n * T + t];
}

inline DigitGemv digit_gemv_of_vectors() {
  return {
      {{pack_digits_of_x<2>, gemv_of<DigitsOfX<2>>}, {pack_digits_of_x<3>, gemv_of<DigitsOfX<3>>}},
      fewest_digits};
}

}  // namespace vlora::quantized::VLORA_ISA

// The tile registers of AMX, and the AVX-512 code that moves data between memory and tiles.
#pragma once

#include <immintrin.h>

#include "runtime/split_fp32_avx512.h"
#include "runtime/tile_unit.h"
#include "runtime/transpose_avx512.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

// The instructions are inline assembly, because the compiler's intrinsics do not accept a template
// parameter as a register number.
struct TileRegisters {
  template <class Shapes>
  static void configure(const Shapes& shapes) {
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  static void release() { asm volatile("tilerelease"); }
  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  static void load(const void* from, ptrdiff_t line_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(line_bytes), "i"(T) : "memory");
  }
  // Loads data that is not read again soon, without evicting other lines from L1.
  template <int T>
  static void load_streaming(const void* from, ptrdiff_t line_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(from), "r"(line_bytes), "i"(T)
                 : "memory");
  }
  template <int T>
  static void store(void* to, ptrdiff_t line_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(line_bytes), "i"(T) : "memory");
  }
  // C += A B: both products of each pair of bf16 are added to fp32 sums.
  template <int C, int A, int B>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  // C += A B: the four products of four signed bytes are added to integer sums.
  template <int C, int A, int B>
  static void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

// Mask of the first `count` of 16 lanes, for any count.
VLORA_INLINE __mmask16 first_lanes(int count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// A line of a tile: 32 bf16 values.
struct Bf16Line {
  __m512i bits;

  void store(char* to) const { _mm512_store_si512(to, bits); }
  // Interleaves the two halves of the line: values 0, 16, 1, 17, …
  Bf16Line interleaved() const {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return {_mm512_permutexvar_epi16(order, bits)};
  }
};

// 32 fp32 values, which become one line of bf16.
struct Fp32Line {
  __m512 low, high;

  static Fp32Line zero() { return {_mm512_setzero_ps(), _mm512_setzero_ps()}; }
  static Fp32Line load(const float* from) {
    return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)};
  }
  static Fp32Line load_some(const float* from, int count) {
    return load_two(from, count, from + 16, count - 16);
  }
  // Loads two halves of up to 16 values each. The rest is zero.
  static Fp32Line load_two(const float* first, int first_count, const float* second,
                           int second_count) {
    return {_mm512_maskz_loadu_ps(first_lanes(first_count), first),
            _mm512_maskz_loadu_ps(first_lanes(second_count), second)};
  }

  Bf16Line rounded() const { return {__m512i(_mm512_cvtne2ps_pbh(high, low))}; }
  // Each of these functions subtracts what it returns from the values.
  Bf16Line take_upper_half() {
    const Bf16Line upper{upper_halves(low, high)};
    low = without_upper_half(low);
    high = without_upper_half(high);
    return upper;
  }
  Bf16Line take_rounded() {
    const Bf16Line nearest = rounded();
    low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(nearest.bits)));
    high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(nearest.bits, 1)));
    return nearest;
  }

 private:
  static __m512 widened(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
  }
};

// Stores 16 lines of pairs transposed: line i of the result holds pair i of each line.
VLORA_INLINE void transpose_pairs(const Bf16Line (&lines)[16], char* to) {
  auto* out = reinterpret_cast<float*>(to);
  for (int quarter = 0; quarter < 4; ++quarter, out += 64) {
    __m512 columns[4];
    transpose_quarter(reinterpret_cast<const float*>(&lines[0]), 16, quarter, columns);
    for (int i = 0; i < 4; ++i) _mm512_store_ps(out + 16 * i, columns[i]);
  }
}

VLORA_INLINE void copy_line(const char* from, char* to) {
  _mm512_store_si512(to, _mm512_loadu_si512(from));
}

// Writes columns 4 quarter … 4 quarter + 3 of a tile of sums, transposed, as up to four rows of y:
// `columns` values of `rows` rows. `bias` (or null) is added, unless the sums are added to y.
VLORA_INLINE void store_transposed(const float* tile, ptrdiff_t line, int quarter, float* y,
                                   ptrdiff_t stride, int rows, int columns, const float* bias,
                                   Store how) {
  const __mmask16 valid = first_lanes(columns);
  const __m512 biases = bias ? _mm512_maskz_loadu_ps(valid, bias) : _mm512_setzero_ps();
  __m512 lines[4];
  transpose_quarter(tile, line, quarter, lines);
  for (int i = 0; i < 4 && i < rows; ++i, y += stride) {
    const __m512 addend = how == Store::kAdd ? _mm512_maskz_loadu_ps(valid, y) : biases;
    const __m512 sums = _mm512_add_ps(lines[i], addend);
    if (how == Store::kStream && columns == 16) {
      _mm512_stream_ps(y, sums);
    } else {
      _mm512_mask_storeu_ps(y, valid, sums);
    }
  }
}

}  // namespace vlora::runtime::VLORA_ISA

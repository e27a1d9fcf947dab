// AMX's eight tile registers, and what vectors do beside them.
#pragma once

#include <immintrin.h>

#include "runtime/split_fp32_avx512.h"
#include "runtime/tile_unit.h"
#include "runtime/transpose_avx512.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

// In assembly: the compiler's intrinsics take no register's number from a template.
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
  static void load(const void* from, ptrdiff_t bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(bytes), "i"(T) : "memory");
  }
  // The same for what is not read again soon: it pushes nothing out of L1.
  template <int T>
  static void load_passing(const void* from, ptrdiff_t bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(bytes), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* to, ptrdiff_t bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(bytes), "i"(T) : "memory");
  }
  // Register C += A B: pairs of bf16, both products added to fp32.
  template <int C, int A, int B>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

struct Beside {
  static void copy_line(const char* from, char* to) { _mm512_store_si512(to, _mm512_loadu_si512(from)); }

  // `rows` of x, `count` values of each, rounded to pairs: a tile with a line for each pair of depth.
  static void pack(const float* x, ptrdiff_t stride, int rows, int count, void* to) {
    alignas(64) float lines[16][16];
    const __mmask16 low = mask(count), high = mask(count - 16);
    for (int t = 0; t < 16; ++t, x += stride) {
      const bool there = t < rows;
      const __m512 first = _mm512_maskz_loadu_ps(there ? low : 0, x);
      const __m512 second = _mm512_maskz_loadu_ps(there ? high : 0, x + 16);
      _mm512_store_si512(lines[t], __m512i(_mm512_cvtne2ps_pbh(second, first)));
    }
    auto* out = static_cast<float*>(to);
    for (int quarter = 0; quarter < 4; ++quarter, out += 64) {
      __m512 turned[4];
      turn(&lines[0][0], 16, quarter, turned);
      for (int i = 0; i < 4; ++i) _mm512_store_ps(out + 16 * i, turned[i]);
    }
  }

  // 32 values as lines of bf16 that add up to them, the largest first, `apart` bytes apart.
  static void split(const float* from, char* to, ptrdiff_t apart) {
    store(limbs(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)), to, apart);
  }
  // The first `count` of them, and zeros.
  static void split_part(const float* from, int count, char* to, ptrdiff_t apart) {
    store(limbs(_mm512_maskz_loadu_ps(mask(count), from), _mm512_maskz_loadu_ps(mask(count - 16), from + 16)), to,
          apart);
  }

  // As `pack`, a tile for each limb.
  static void pack_limbs(const float* x, ptrdiff_t stride, int rows, int count, void* to) {
    alignas(64) float lines[runtime::kLimbs][16][16];
    const __mmask16 low = mask(count), high = mask(count - 16);
    for (int t = 0; t < 16; ++t, x += stride) {
      const bool there = t < rows;
      const Limbs all = limbs(_mm512_maskz_loadu_ps(there ? low : 0, x),
                              _mm512_maskz_loadu_ps(there ? high : 0, x + 16));
      for (int i = 0; i < runtime::kLimbs; ++i) _mm512_store_si512(lines[i][t], all.line[i]);
    }
    auto* out = static_cast<float*>(to);
    for (int limb = 0; limb < runtime::kLimbs; ++limb)
      for (int quarter = 0; quarter < 4; ++quarter, out += 64) {
        __m512 turned[4];
        turn(&lines[limb][0][0], 16, quarter, turned);
        for (int i = 0; i < 4; ++i) _mm512_store_ps(out + 16 * i, turned[i]);
      }
  }

  // Columns 4 quarter … of a tile of sums, each plus bias unless they are added to what is there, to `rows`
  // rows of y of `columns` values.
  static void store_turned(const float* tile, ptrdiff_t line, int quarter, float* y, ptrdiff_t stride, int rows,
                           int columns, const float* bias, Stored how) {
    const __mmask16 there = mask(columns);
    const __m512 add = bias ? _mm512_maskz_loadu_ps(there, bias) : _mm512_setzero_ps();
    __m512 turned[4];
    turn(tile, line, quarter, turned);
    for (int i = 0; i < 4 && i < rows; ++i, y += stride) {
      const __m512 other = how == Stored::kAdded ? _mm512_maskz_loadu_ps(there, y) : add;
      const __m512 sums = _mm512_add_ps(turned[i], other);
      if (how == Stored::kPastCaches && columns == 16) {
        _mm512_stream_ps(y, sums);
      } else {
        _mm512_mask_storeu_ps(y, there, sums);
      }
    }
  }

 private:
  struct Limbs {
    __m512i line[runtime::kLimbs];
  };
  // The upper halves of values' bits, twice, and what is then left, which fits bf16. Of a value that is not
  // finite what is left is a NaN.
  static Limbs limbs(__m512 a, __m512 b) {
    Limbs found;
    for (int i = 0; i + 1 < runtime::kLimbs; ++i, a = without_upper_half(a), b = without_upper_half(b))
      found.line[i] = upper_halves(a, b);
    found.line[runtime::kLimbs - 1] = __m512i(_mm512_cvtne2ps_pbh(b, a));
    return found;
  }
  static void store(const Limbs& all, char* to, ptrdiff_t apart) {
    for (int i = 0; i < runtime::kLimbs; ++i) _mm512_store_si512(to + i * apart, all.line[i]);
  }
  static __mmask16 mask(int count) {
    return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
  }
};

}  // namespace vlora::runtime::VLORA_ISA

// AMX's tile registers emulated in plain C++, for tests on CPUs without AMX. An operation on which
// AMX would fault aborts the process. The rest of the file is the plain C++ equivalent of
// tile_amx.h.
#pragma once

#include <cstdlib>
#include <cstring>

#include "runtime/bf16.h"
#include "runtime/tile_unit.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct TileRegisters {
  struct Register {
    int rows, line_bytes;
    unsigned char line[16][64];
  };
  static Register& at(int tile) {
    static thread_local Register registers[8] = {};
    return registers[tile];
  }

  template <class Shapes>
  static void configure(const Shapes& s) {
    if (s.palette != 1 || s.start_row) std::abort();
    for (int t = 0; t < 8; ++t) {
      if (s.rows[t] > 16 || s.line_bytes[t] > 64 || !s.rows[t] != !s.line_bytes[t]) std::abort();
      std::memset(&at(t), 0, sizeof(Register));
      at(t).rows = s.rows[t];
      at(t).line_bytes = s.line_bytes[t];
    }
  }
  static void release() {
    for (int t = 0; t < 8; ++t) std::memset(&at(t), 0, sizeof(Register));
  }
  template <int T>
  static void zero() {
    if (!at(T).rows) std::abort();
    std::memset(at(T).line, 0, sizeof at(T).line);
  }
  template <int T>
  static void load(const void* from, ptrdiff_t line_bytes) {
    zero<T>();
    for (int row = 0; row < at(T).rows; ++row)
      std::memcpy(at(T).line[row], static_cast<const char*>(from) + row * line_bytes,
                  size_t(at(T).line_bytes));
  }
  template <int T>
  static void load_streaming(const void* from, ptrdiff_t line_bytes) {
    load<T>(from, line_bytes);
  }
  template <int T>
  static void store(void* to, ptrdiff_t line_bytes) {
    if (!at(T).rows) std::abort();
    for (int row = 0; row < at(T).rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * line_bytes, at(T).line[row],
                  size_t(at(T).line_bytes));
  }
  template <int C, int A, int B>
  static void multiply() {
    multiply_elements<C, A, B, float>([](float sum, uint32_t a, uint32_t b) {
      sum += fp32_of(uint16_t(a)) * fp32_of(uint16_t(b));
      return sum + fp32_of(uint16_t(a >> 16)) * fp32_of(uint16_t(b >> 16));
    });
  }
  template <int C, int A, int B>
  static void multiply_bytes() {
    // Sums of four products are exact in fp32, which every x86-64 CPU multiplies in vectors.
    multiply_elements<C, A, B, int32_t>([](int32_t sum, uint32_t a, uint32_t b) {
      float products = 0;
      for (int left = 24; left >= 0; left -= 8)
        products += float(int32_t(a << left) >> 24) * float(int32_t(b << left) >> 24);
      return sum + int32_t(products);
    });
  }

 private:
  // Replaces each sum by add(sum, a, b), for every four bytes a of a line of A and b of a column of
  // B. A line of sums is a local array, since the compiler keeps it in registers.
  template <int C, int A, int B, class Sum, class Add>
  static void multiply_elements(const Add& add) {
    Register &c = at(C), &a = at(A), &b = at(B);
    if (c.rows != a.rows || c.line_bytes != b.line_bytes || a.line_bytes != 4 * b.rows || !c.rows)
      std::abort();
    for (int m = 0; m < c.rows; ++m) {
      Sum sums[16];
      std::memcpy(sums, c.line[m], sizeof sums);
      for (int k = 0; k < b.rows; ++k) {
        uint32_t factor, factors[16];
        std::memcpy(&factor, a.line[m] + 4 * k, sizeof factor);
        std::memcpy(factors, b.line[k], sizeof factors);
        for (int n = 0; n < 16; ++n) sums[n] = add(sums[n], factor, factors[n]);
      }
      std::memcpy(c.line[m], sums, size_t(c.line_bytes));
    }
  }
};

struct Bf16Line {
  uint16_t value[32];

  void store(char* to) const { std::memcpy(to, value, sizeof value); }
  Bf16Line interleaved() const {
    Bf16Line line;
    for (int k = 0; k < 32; ++k) line.value[k] = value[k / 2 + k % 2 * 16];
    return line;
  }
};

struct Fp32Line {
  float value[32];

  static Fp32Line zero() { return {}; }
  static Fp32Line load(const float* from) { return load_some(from, 32); }
  static Fp32Line load_some(const float* from, int count) {
    return load_two(from, count, from + 16, count - 16);
  }
  static Fp32Line load_two(const float* first, int first_count, const float* second,
                           int second_count) {
    Fp32Line line = {};
    for (int k = 0; k < 16 && k < first_count; ++k) line.value[k] = first[k];
    for (int k = 0; k < 16 && k < second_count; ++k) line.value[16 + k] = second[k];
    return line;
  }

  Bf16Line rounded() const {
    Bf16Line line;
    for (int k = 0; k < 32; ++k) line.value[k] = bf16_of(value[k]);
    return line;
  }
  Bf16Line take_upper_half() {
    Bf16Line line;
    for (int k = 0; k < 32; ++k)
      line.value[k] = vlora::runtime::VLORA_ISA::take_upper_half(value[k]);
    return line;
  }
  Bf16Line take_rounded() {
    const Bf16Line line = rounded();
    for (int k = 0; k < 32; ++k) value[k] -= fp32_of(line.value[k]);
    return line;
  }
};

inline void transpose_pairs(const Bf16Line (&lines)[16], char* to) {
  for (int t = 0; t < 16; ++t)
    for (int pair = 0; pair < 16; ++pair)
      std::memcpy(to + pair * 64 + t * 4, &lines[t].value[2 * pair], 4);
}

inline void copy_line(const char* from, char* to) { std::memcpy(to, from, 64); }

inline void store_transposed(const float* tile, ptrdiff_t line, int quarter, float* y,
                             ptrdiff_t stride, int rows, int columns, const float* bias,
                             Store how) {
  for (int i = 0; i < rows && i < 4; ++i)
    for (int n = 0; n < columns; ++n) {
      float& to = y[i * stride + n];
      to = tile[n * line + 4 * quarter + i] + (how == Store::kAdd ? to : bias ? bias[n] : 0);
    }
}

}  // namespace vlora::runtime::VLORA_ISA

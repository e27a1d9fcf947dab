// The tile registers in plain C++: what AMX does, for tests where there is none. What its shapes forbid
// ends the process, as the unit's fault would.
#pragma once

#include <cstdlib>
#include <cstring>

#include "runtime/tile_unit.h"
#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct TileRegisters {
  struct Register {
    int rows, bytes;
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
      if (s.rows[t] > 16 || s.bytes[t] > 64 || !s.rows[t] != !s.bytes[t]) std::abort();
      std::memset(&at(t), 0, sizeof(Register));
      at(t).rows = s.rows[t];
      at(t).bytes = s.bytes[t];
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
  static void load(const void* from, ptrdiff_t bytes) {
    zero<T>();
    for (int row = 0; row < at(T).rows; ++row)
      std::memcpy(at(T).line[row], static_cast<const char*>(from) + row * bytes, size_t(at(T).bytes));
  }
  template <int T>
  static void load_passing(const void* from, ptrdiff_t bytes) {
    load<T>(from, bytes);
  }
  template <int T>
  static void store(void* to, ptrdiff_t bytes) {
    if (!at(T).rows) std::abort();
    for (int row = 0; row < at(T).rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * bytes, at(T).line[row], size_t(at(T).bytes));
  }
  template <int C, int A, int B>
  static void multiply() {
    Register &c = at(C), &a = at(A), &b = at(B);
    if (c.rows != a.rows || c.bytes != b.bytes || a.bytes != 4 * b.rows || !c.rows) std::abort();
    for (int m = 0; m < c.rows; ++m)
      for (int k = 0; k < b.rows; ++k)
        for (int n = 0; n < c.bytes / 4; ++n) {
          float sum;
          std::memcpy(&sum, c.line[m] + 4 * n, 4);
          for (int odd = 0; odd < 2; ++odd)
            sum += value(a.line[m] + 4 * k + 2 * odd) * value(b.line[k] + 4 * n + 2 * odd);
          std::memcpy(c.line[m] + 4 * n, &sum, 4);
        }
  }

 private:
  static float value(const unsigned char* bf16) {
    const uint32_t bits = uint32_t(bf16[0]) << 16 | uint32_t(bf16[1]) << 24;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
};

// What tile_amx.h does by vectors.
struct Beside {
  static void copy_line(const char* from, char* to) { std::memcpy(to, from, 64); }

  static void pack(const float* x, ptrdiff_t stride, int rows, int count, void* to) {
    auto* const out = static_cast<uint16_t*>(to);
    for (int t = 0; t < 16; ++t)
      for (int k = 0; k < 32; ++k)
        out[k / 2 * 32 + 2 * t + k % 2] = t < rows && k < count ? rounded(x[t * stride + k]) : uint16_t(0);
  }

  static void split(const float* from, char* to, ptrdiff_t apart) { split_part(from, 32, to, apart); }
  static void split_part(const float* from, int count, char* to, ptrdiff_t apart) {
    for (int k = 0; k < 32; ++k) {
      uint16_t found[runtime::kLimbs];
      limbs(k < count ? from[k] : 0, found);
      for (int i = 0; i < runtime::kLimbs; ++i) std::memcpy(to + i * apart + 2 * k, &found[i], 2);
    }
  }

  static void pack_limbs(const float* x, ptrdiff_t stride, int rows, int count, void* to) {
    auto* const out = static_cast<uint16_t*>(to);
    for (int t = 0; t < 16; ++t)
      for (int k = 0; k < 32; ++k) {
        uint16_t found[runtime::kLimbs];
        limbs(t < rows && k < count ? x[t * stride + k] : 0, found);
        for (int i = 0; i < runtime::kLimbs; ++i) out[512 * i + k / 2 * 32 + 2 * t + k % 2] = found[i];
      }
  }

  static void store_turned(const float* tile, ptrdiff_t line, int quarter, float* y, ptrdiff_t stride, int rows,
                           int columns, const float* bias, Stored how) {
    for (int i = 0; i < rows && i < 4; ++i)
      for (int n = 0; n < columns; ++n) {
        float& to = y[i * stride + n];
        to = tile[n * line + 4 * quarter + i] + (how == Stored::kAdded ? to : bias ? bias[n] : 0);
      }
  }

 private:
  static void limbs(float value, uint16_t (&found)[runtime::kLimbs]) {
    for (int i = 0; i + 1 < runtime::kLimbs; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      found[i] = uint16_t(bits >> 16);
      bits &= 0xffff0000u;
      float upper;
      std::memcpy(&upper, &bits, sizeof upper);
      value -= upper;
    }
    found[runtime::kLimbs - 1] = rounded(value);
  }
  // To nearest, ties to even; a NaN stays one.
  static uint16_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

}  // namespace vlora::runtime::VLORA_ISA

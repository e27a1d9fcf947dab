// AMX's eight tile registers.
#pragma once

#include "cpu/types.h"

namespace vlora::cpu::VLORA_ISA {

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

}  // namespace vlora::cpu::VLORA_ISA

// Types and constants that all CPU kernels share. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

#define VLORA_INLINE inline __attribute__((always_inline))

namespace vlora {

enum class Dtype : uint8_t { kFp32 = 0, kBf16 = 1 };
constexpr int kDtypes = 2;

inline size_t size_of(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Number of fp32 values in a vector (vector.h), and of rows in a panel. They fill one AVX-512
// register, two AVX2 registers, or one cache line.
constexpr int kLanes = 16;

}  // namespace vlora

// What all kernels on the CPU speak of. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vlora {

enum class Dtype : uint8_t { kFp32 = 0, kBf16 = 1 };
constexpr int kDtypes = 2;

inline size_t size_of(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kLanes = 16;
// fp32 values of one vector (vector_*.h): one AVX-512 register, two of AVX2, a cache line.

}  // namespace vlora

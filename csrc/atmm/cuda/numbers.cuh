// Conversions of the two storage types to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace vlora {

template <typename T>
__device__ float widened(T v);
template <>
__device__ inline float widened<__half>(__half v) { return __half2float(v); }
template <>
__device__ inline float widened<__nv_bfloat16>(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ T narrowed(float v);
template <>
__device__ inline __half narrowed<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ inline __nv_bfloat16 narrowed<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

}  // namespace vlora

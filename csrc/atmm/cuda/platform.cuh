// The functions that the kernels need from their compiler: nvcc, or any C++17 compiler with the
// emulation, which runs the kernels on the host, thread by thread (host/emulation.cuh). Nothing
// here is specific to ATMM.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "host/emulation.cuh"
#endif

#define VLORA_HD __host__ __device__ inline

namespace vlora {

constexpr int kWarp = 32;

template <typename T>
struct Same {
  using Type = T;
};

#ifdef __CUDACC__

using Half = __half;
using Bfloat = __nv_bfloat16;

VLORA_HD float to_float(float v) { return v; }
VLORA_HD float to_float(Half v) { return __half2float(v); }
VLORA_HD float to_float(Bfloat v) { return __bfloat162float(v); }
template <typename T>
VLORA_HD T from_float(float v);
template <>
VLORA_HD float from_float<float>(float v) {
  return v;
}
template <>
VLORA_HD Half from_float<Half>(float v) {
  return __float2half_rn(v);
}
template <>
VLORA_HD Bfloat from_float<Bfloat>(float v) {
  return __float2bfloat16_rn(v);
}

// Launches a kernel and returns the error of this launch only. That error is cleared from the
// thread's record, so that later callers of cudaGetLastError do not see it. Earlier errors stay in
// the record.
template <typename... P>
cudaError_t launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
                   typename Same<P>::Type... args) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid,
                                             dim3(threads), pointers, shared, stream);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// Loads a kernel, and sets `resident` to the number of its blocks that fit on the device.
template <typename... P>
cudaError_t warm(void (*kernel)(P...), int threads, int shared, int* resident) {
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  int device = 0, sms = 0, per_sm = 0;
  cudaError_t error = cudaFuncGetAttributes(&attributes, function);  // loads the module
  if (error == cudaSuccess && shared > 48 * 1024)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, function, threads, shared);
  if (error == cudaSuccess && per_sm == 0) error = cudaErrorLaunchOutOfResources;
  if (error != cudaSuccess) (void)cudaGetLastError();
  *resident = per_sm * sms;
  return error;
}

// Replaces values[i] with its sum over each group of `lanes` (a power of two) neighbouring lanes.
template <int N>
__device__ __forceinline__ void sum_lanes(float (&values)[N], int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
  }
}

// Returns the number of lanes of the warp for which `value` is true. All lanes must call it.
__device__ __forceinline__ int count_lanes(bool value) {
  return __popc(__ballot_sync(0xffffffffu, value));
}

// Adds 1 to a counter after everything that the block has written. All threads must call it.
__device__ __forceinline__ void signal(unsigned* counter) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  atomicAdd(counter, 1u);
}

// Waits until a counter has reached `value`. What was written before is then visible to the block.
// All threads must call it.
__device__ __forceinline__ void wait_for(unsigned* counter, unsigned value) {
  if (threadIdx.x == 0) {
    while (*static_cast<volatile unsigned*>(counter) < value) __nanosleep(20);
    __threadfence();
  }
  __syncthreads();
}

#define VLORA_SHARED(type, name)                                        \
  extern __shared__ __align__(16) unsigned char vlora_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(vlora_dynamic_shared)

#else

using Half = emulation::Half;
using Bfloat = emulation::Bfloat;
using emulation::count_lanes;
using emulation::from_float;
using emulation::launch;
using emulation::signal;
using emulation::sum_lanes;
using emulation::to_float;
using emulation::wait_for;
using emulation::warm;

#define VLORA_SHARED(type, name) const emulation::Shared<type> name

#endif

// Number of elements in 16 bytes.
template <typename T>
constexpr int kVector = 16 / int(sizeof(T));

// Loads 16 bytes and converts their elements to fp32.
template <typename T>
__device__ __forceinline__ void load16(const T* from, float (&to)[kVector<T>]) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from));
  T elements[kVector<T>];
  memcpy(elements, &raw, sizeof raw);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) to[i] = to_float(elements[i]);
}

VLORA_HD bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
VLORA_HD int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
VLORA_HD int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace vlora

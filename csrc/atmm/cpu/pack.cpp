#include <cstring>

#include "atmm/operator.h"

namespace vlora::atmm {
namespace {

template <class T>
void pack_as(T* to, const T* matrix, int64_t n, int64_t k, ptrdiff_t n_stride, ptrdiff_t k_stride,
             int together) {
  const int64_t panels = (n + kPanel - 1) / kPanel, steps = (k + together - 1) / together;
  std::memset(to, 0, size_t(panels * steps * kPanel * together) * sizeof(T));
  for (int64_t row = 0; row < n; ++row) {
    T* panel = to + row / kPanel * steps * kPanel * together + row % kPanel * together;
    for (int64_t i = 0; i < k; ++i)
      panel[i / together * kPanel * together + i % together] = matrix[row * n_stride + i * k_stride];
  }
}

}  // namespace

size_t packed_bytes(int64_t n, int64_t k, Dtype dtype) {
  const int64_t steps = dtype == Dtype::kFp32 ? k : (k + 1) / 2;
  return size_t((n + kPanel - 1) / kPanel * steps * kPanel * 4);
}

void pack(void* to, const void* matrix, int64_t n, int64_t k, ptrdiff_t n_stride,
          ptrdiff_t k_stride, Dtype dtype) {
  if (dtype == Dtype::kFp32)
    pack_as(static_cast<float*>(to), static_cast<const float*>(matrix), n, k, n_stride, k_stride, 1);
  else
    pack_as(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(matrix), n, k, n_stride,
            k_stride, 2);
}

}  // namespace vlora::atmm

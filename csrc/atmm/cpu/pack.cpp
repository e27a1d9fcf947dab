#include <algorithm>
#include <cstring>

#include "atmm/operator.h"

namespace vlora::atmm {
namespace {

template <class T>
void pack_as(T* to, const T* matrix, int64_t n, int64_t k, ptrdiff_t n_stride, ptrdiff_t k_stride,
             int together, int bundle) {
  const int64_t panels = (n + kPanel - 1) / kPanel, steps = (k + together - 1) / together;
  const int64_t line = kPanel * together;  // of one panel in one step
  std::memset(to, 0, size_t(panels * steps * line) * sizeof(T));
  for (int64_t row = 0; row < n; ++row) {
    const int64_t panel = row / kPanel, first = panel / bundle * bundle;
    const int64_t width = std::min<int64_t>(bundle, panels - first);
    T* at = to + (first * steps + panel - first) * line + row % kPanel * together;
    for (int64_t i = 0; i < k; ++i)
      at[i / together * width * line + i % together] = matrix[row * n_stride + i * k_stride];
  }
}

}  // namespace

size_t packed_bytes(int64_t n, int64_t k, Dtype dtype) {
  const int64_t steps = dtype == Dtype::kFp32 ? k : (k + 1) / 2;
  return size_t((n + kPanel - 1) / kPanel * steps * kPanel * 4);
}

void pack(void* to, const void* matrix, int64_t n, int64_t k, ptrdiff_t n_stride,
          ptrdiff_t k_stride, Dtype dtype, int bundle) {
  if (dtype == Dtype::kFp32)
    pack_as(static_cast<float*>(to), static_cast<const float*>(matrix), n, k, n_stride, k_stride, 1,
            bundle);
  else
    pack_as(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(matrix), n, k, n_stride,
            k_stride, 2, bundle);
}

}  // namespace vlora::atmm

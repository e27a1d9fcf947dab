// Packing of matrices into interleaved panels.
#include <algorithm>
#include <cstring>

#include "atmm/operator.h"

namespace vlora::atmm {
namespace {

// step_values: number of values of the depth in one step.
template <class T>
void pack_as(T* to, const T* matrix, int64_t n, int64_t k, ptrdiff_t n_stride, ptrdiff_t k_stride,
             int step_values, int bundle, bool narrow) {
  const int64_t panels = ceil_div(n, kPanel), steps = ceil_div(k, step_values);
  const int64_t wide = panels - (narrow && has_narrow_panel(n));
  const int64_t line = kPanel * step_values;  // values of one panel in one step
  for (int64_t row = 0; row < n; ++row) {
    const int64_t panel = row / kPanel, first = panel / bundle * bundle;
    if (panel == wide) {
      T* lane = to + panel * steps * line + row % kPanel * 2 * step_values;
      for (int64_t i = 0; i < k; ++i)
        lane[i / (2 * step_values) * line + i % (2 * step_values)] =
            matrix[row * n_stride + i * k_stride];
      continue;
    }
    const int64_t width = std::min<int64_t>(bundle, wide - first);
    T* lane = to + (first * steps + panel - first) * line + row % kPanel * step_values;
    for (int64_t i = 0; i < k; ++i)
      lane[i / step_values * width * line + i % step_values] =
          matrix[row * n_stride + i * k_stride];
  }
}

}  // namespace

size_t packed_bytes(int64_t n, int64_t k, Dtype dtype, bool narrow) {
  const int64_t steps = dtype == Dtype::kFp32 ? k : ceil_div(k, 2);
  const int64_t panels = ceil_div(n, kPanel), narrow_panels = narrow && has_narrow_panel(n);
  return size_t(((panels - narrow_panels) * steps + narrow_panels * ceil_div(steps, 2)) * kPanel *
                4);
}

void pack(void* to, const void* matrix, int64_t n, int64_t k, ptrdiff_t n_stride,
          ptrdiff_t k_stride, Dtype dtype, int bundle, bool narrow) {
  std::memset(to, 0, packed_bytes(n, k, dtype, narrow));
  if (dtype == Dtype::kFp32)
    pack_as(static_cast<float*>(to), static_cast<const float*>(matrix), n, k, n_stride, k_stride, 1,
            bundle, narrow);
  else
    pack_as(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(matrix), n, k, n_stride,
            k_stride, 2, bundle, narrow);
}

}  // namespace vlora::atmm

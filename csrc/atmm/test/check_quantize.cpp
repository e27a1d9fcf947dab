// Checks of quantization against rounding in double precision, and of interleaving panels.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check_quantized.h"
#include "quantized/quantize.h"
#include "random_values.h"

using namespace vlora;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

int value_of(const quantized::Weight& w, int64_t n, int64_t k) {
  const uint8_t* const row = w.values + n * w.row_bytes();
  if (w.bits == 8) return int8_t(row[k]);
  const int64_t in_block = k % quantized::kBlock, nibble = in_block / 16;
  const int byte = row[k / quantized::kBlock * 32 + in_block % 16 * 2 + nibble / 2];
  return byte >> nibble % 2 * 4 & 15;
}

// Quantizes some rows of a random matrix. The squared error of a group must be at most a little
// larger than with equal steps between the extremes. In a group that the row ends in, whose padding
// takes part in the fit, the error of a weight must be below a step on average.
void check_rows(const quantized::Kernels& kernels) {
  const Dtype dtype = Dtype(draw(0, 1));
  const int bits = any_of<int>({4, 8});
  const int64_t n = draw(1, 6), k = any_of<int64_t>({draw(1, 64), draw(1, 300), draw(513, 4500)});
  const int shift = bits == 8 && draw(0, 1) ? quantized::Weight::kWholeRow : any_of<int>({5, 6, 7});
  const int64_t stride = k + draw(0, 3);
  const Values weights(dtype, (n - 1) * stride + k, 1);
  const quantized::Weight sizes{bits, nullptr, nullptr, nullptr, n, k, shift, false};
  std::vector<uint8_t> values(size_t(n * sizes.row_bytes()));
  std::vector<float> scales(size_t(n * sizes.groups()));
  std::vector<int8_t> zeros(bits == 4 ? scales.size() : 0);
  const quantized::Quantization q{dtype,         weights.bytes.get(), stride, bits, values.data(),
                                  scales.data(), zeros.data(),        n,      k,    shift,
                                  false};
  const int64_t from = draw(0, n - 1), to = draw(from + 1, n);
  require(kernels.quantize(q, from, to) == -1, "finite weights are refused");
  const quantized::Weight w = q.result();
  const int64_t size = std::min(k, int64_t(1) << shift);
  for (int64_t row = from; row < to; ++row)
    for (int64_t first = 0; first < k; first += size) {
      const int64_t end = std::min(k, first + size), index = row * w.groups() + first / size;
      const auto weight = [&](int64_t i) { return weights[row * stride + i]; };
      double low = 0, high = 0;
      for (int64_t i = first; i < end; ++i)
        low = std::min(low, weight(i)), high = std::max(high, weight(i));
      if (bits == 8) high = std::max(high, -low), low = -high;
      const double step = std::max(1e-30, (high - low) / (bits == 8 ? 254 : 15));
      double error = 0, plain = 0;
      for (int64_t i = first; i < end; ++i) {
        const double zero = bits == 8 ? 0 : w.zero(index);
        error += std::pow(w.scales[index] * (value_of(w, row, i) - zero) - weight(i), 2);
        plain += std::pow(std::round((weight(i) - low) / step) * step + low - weight(i), 2);
      }
      const bool padded = bits == 4 && first + (int64_t(1) << shift) > k;
      const double allowed = padded ? double(end - first) * step * step : 1.3 * plain;
      require(error <= allowed + 1e-6, "the error of a group is too large");
    }
}

void check_bad_row(const quantized::Kernels& kernels) {
  const int bits = any_of<int>({4, 8});
  const int64_t n = 3, k = draw(1, 200), bad = draw(0, n - 1);
  std::vector<float> weights(size_t(n * k), 1.0f);
  weights[size_t(bad * k + draw(0, k - 1))] = any_of<float>({INFINITY, -INFINITY, NAN});
  const quantized::Weight sizes{bits, nullptr, nullptr, nullptr, n, k, 5, 0};
  std::vector<uint8_t> values(size_t(n * sizes.row_bytes()));
  std::vector<float> scales(size_t(n * sizes.groups()));
  std::vector<int8_t> zeros(scales.size());
  const quantized::Quantization q{Dtype::kFp32,  weights.data(), k, bits, values.data(),
                                  scales.data(), zeros.data(),   n, k,    5,
                                  false};
  require(kernels.quantize(q, 0, n) == bad, "a row that is not finite is not found");
}

void check_interleaving() {
  const int64_t rows = any_of<int64_t>({quantized::kPanelRows, quantized::kTilePanelRows});
  const int64_t n = rows * draw(1, 5), k = draw(1, 700);
  const quantized::Weight sizes{4, nullptr, nullptr, nullptr, n, k, any_of<int>({5, 6, 7}), 0};
  const int64_t groups = sizes.groups();
  std::vector<uint8_t> values;
  std::vector<float> scales;
  std::vector<int8_t> zeros;
  for (int64_t i = n * sizes.row_bytes(); i > 0; --i) values.push_back(uint8_t(draw(0, 255)));
  for (int64_t i = n * groups; i > 0; --i)
    scales.push_back(float(draw(0, 1000))), zeros.push_back(int8_t(draw(-64, 120)));
  values.shrink_to_fit(), scales.shrink_to_fit(), zeros.shrink_to_fit();
  std::vector<uint8_t> panels = values;
  std::vector<float> panel_scales = scales;
  std::vector<int8_t> panel_zeros = zeros;
  const bool has_zeros = draw(0, 1);
  quantized::interleave(4, panels.data(), panel_scales.data(),
                        has_zeros ? panel_zeros.data() : nullptr, n, sizes.row_bytes(), groups,
                        rows, int(draw(1, 3)));
  quantized::Weight w = sizes;
  quantized::Weight of_panels = sizes;
  w.values = values.data();
  of_panels.values = panels.data(), of_panels.panel_rows = rows;
  for (int64_t row = 0; row < n; ++row) {
    const int64_t panel = row / rows, in_panel = row % rows;
    for (int64_t i = 0; i < sizes.blocks() * quantized::kBlock; ++i) {
      require(value_in_panels(of_panels, row, i) == value_of(w, row, i), "a value has moved");
    }
    for (int64_t group = 0; group < groups; ++group) {
      const size_t to = size_t((panel * groups + group) * rows + in_panel);
      const size_t from = size_t(row * groups + group);
      require(panel_scales[to] == scales[from], "a scale has moved");
      require(panel_zeros[has_zeros ? to : from] == zeros[from], "a zero has moved");
    }
  }
}

}  // namespace

void check_quantize(runtime::Isa isa) {
  check_interleaving();
  const quantized::Kernels& kernels = quantized::kernels(isa);
  if (!kernels.quantize) return;
  check_rows(kernels);
  check_bad_row(kernels);
}

// Checks of products with int8 and int4 weights against double precision.
#include "check_quantized.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "quantized/dynamic_int4.h"
#include "quantized/quantize.h"
#include "random_values.h"
#include "runtime/kernel_scope.h"

using namespace vlora;

int value_in_panels(const quantized::Weight& w, int64_t n, int64_t k) {
  const uint8_t* const panel = w.values + n / w.panel_rows * w.panel_rows * w.row_bytes();
  // The byte of the 16 that hold the row's values in a group, and whether k is in its high bits.
  const bool in_pairs = w.panel_rows == quantized::kTilePanelRows;
  const int64_t i = k % 32, byte = in_pairs ? i / 8 * 4 + i % 2 * 2 + i % 8 / 4 : i % 16;
  const bool high = in_pairs ? i % 4 > 1 : i >= 16;
  const int64_t word = k / 32 * 4 + byte / 4;
  const int both = panel[(word * w.panel_rows + n % w.panel_rows) * 4 + byte % 4];
  return high ? both >> 4 : both & 15;
}

namespace {

// A random matrix. Every buffer is exactly as large as its contents.
struct Matrix {
  quantized::Weight w;
  std::vector<uint8_t> values;
  std::vector<float> scales;
  std::vector<int8_t> zeros;

  explicit Matrix(int64_t panel_rows) {
    w.bits = panel_rows ? 4 : any_of<int>({4, 8});
    w.n = panel_rows ? panel_rows * draw(1, 10) : draw(1, 40);
    w.k = any_of<int64_t>({draw(1, 64), draw(1, 300), 512, draw(513, 1100)});
    w.group_shift = any_of<int>({5, 6, 7});
    w.panel_rows = panel_rows;
    if (w.bits == 8 && draw(0, 1)) w.group_shift = quantized::Weight::kWholeRow;
    for (int64_t i = w.n * w.row_bytes(); i > 0; --i) values.push_back(uint8_t(draw(0, 255)));
    for (int64_t i = w.n * w.groups(); i > 0; --i) {
      scales.push_back(float(draw(10, 20)) / (w.bits == 4 ? 160 : 2560));
      zeros.push_back(int8_t(draw(-64, 120)));
    }
    values.shrink_to_fit(), scales.shrink_to_fit(), zeros.shrink_to_fit();
    w.values = values.data(), w.scales = scales.data();
    w.zeros = w.bits == 4 && draw(0, 1) ? zeros.data() : nullptr;
  }

  double at(int64_t n, int64_t k) const {
    const int64_t group = k >> w.group_shift;
    if (w.panel_rows) {
      const int64_t panel = n / w.panel_rows, row = n % w.panel_rows;
      return weight(value_in_panels(w, n, k), (panel * w.groups() + group) * w.panel_rows + row);
    }
    const uint8_t* const row = values.data() + n * w.row_bytes();
    const int64_t of_row = n * w.groups() + group;
    if (w.bits == 8) return double(w.scales[of_row]) * int8_t(row[k]);
    const int64_t in_block = k % quantized::kBlock, nibble = in_block / 16;
    const int byte = row[k / quantized::kBlock * 32 + in_block % 16 * 2 + nibble / 2];
    return weight(byte >> nibble % 2 * 4 & 15, of_row);
  }

 private:
  double weight(int value, int64_t group) const {
    return double(w.scales[group]) * (value - (w.zeros ? w.zero(group) : quantized::kMiddle));
  }
};

struct alignas(64) Line {
  char bytes[64];
};

void compare(const char* what, double actual, double expected, double tolerance) {
  if (std::abs(actual - expected) <= tolerance) return;
  std::printf("%s: %g instead of %g\n", what, actual, expected);
  std::exit(1);
}

// Random rows of x for a matrix, and their product.
struct Rows {
  const Matrix& matrix;
  const int64_t rows, x_stride, y_stride;
  Values x, bias;
  std::vector<float> y;
  quantized::Product p;

  // max_outliers: largest number of values that are 10^4 times as large as the others.
  Rows(const Matrix& matrix, int64_t rows, int64_t max_outliers = 5)
      : matrix(matrix),
        rows(rows),
        x_stride(matrix.w.k + draw(0, 3)),
        y_stride(matrix.w.n + draw(0, 3)),
        x(Dtype::kFp32, (rows - 1) * x_stride + matrix.w.k, 1),
        bias(Dtype::kFp32, matrix.w.n, 1),
        y(size_t((rows - 1) * y_stride + matrix.w.n)),
        p{matrix.w,
          floats(x),
          rows,
          x_stride,
          y.data(),
          y_stride,
          draw(0, 1) ? floats(bias) : nullptr} {
    // The products of a large value with its weight and with its zero may cancel.
    const bool some = p.w.panel_rows && !p.w.zeros;
    for (int64_t outliers = some ? draw(0, max_outliers) : 0; outliers > 0; --outliers)
      floats(x)[draw(0, int64_t(x.count) - 1)] *= 1e4f;
  }

  // error: the largest error relative to the sum of absolute products.
  void compare_all(const char* what, double error) const {
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t n = 0; n < p.w.n; ++n) {
        double expected = p.bias ? p.bias[n] : 0, sizes = 1;
        for (int64_t k = 0; k < p.w.k; ++k) {
          const double product = matrix.at(n, k) * p.x[t * p.x_stride + k];
          expected += product, sizes += std::abs(product);
        }
        compare(what, y[size_t(t * p.y_stride + n)], expected, error * sizes);
      }
  }

 private:
  static float* floats(const Values& values) {
    return reinterpret_cast<float*>(values.bytes.get());
  }
};

// digits: number of digits of x that are multiplied, or 0.
void check_gemv(const quantized::Kernels& kernels, const quantized::Gemv& gemv,
                const Matrix& matrix, double error, int digits = 0) {
  const Rows rows(matrix, draw(1, kernels.max_gemv_rows));
  const int64_t pieces = matrix.w.n / (matrix.w.panel_rows ? matrix.w.panel_rows : gemm::kStreams),
                floats = digits ? quantized::digit_gemv_scratch(rows.p, digits)
                                : quantized::gemv_scratch(rows.p);
  const std::unique_ptr<float[]> packed(new float[size_t(floats)]);
  gemv.pack(rows.p, packed.get());
  const int64_t middle = draw(0, pieces);
  if (middle > 0 && middle < pieces) gemv.run(rows.p, packed.get(), 0, middle);
  gemv.run(rows.p, packed.get(), middle < pieces ? middle : 0, pieces);
  rows.compare_all("gemv", error);
}

void check_tiles(const gemm::AmxGemm& tiles, const Matrix& matrix) {
  const Rows rows(matrix, draw(1, 70));
  const quantized::Product& p = rows.p;
  const bool exact = p.w.has_row_scales() && draw(0, 1);
  gemm::multiply_by_tiles(tiles,
                          {exact ? Dtype::kFp32 : Dtype::kBf16, &p.w, p.w.n, p.w.k, p.x, p.rows,
                           p.x_stride, p.y, p.y_stride, p.bias},
                          int(draw(1, 3)));
  rows.compare_all("product on tiles", exact ? 2e-6 : 2e-2);
}

// Values of x differ so little that digits represent them as exactly as the type does.
void check_digits(const quantized::DigitGemms& gemms, const Matrix& matrix) {
  if (matrix.w.bits != 8 || !matrix.w.has_row_scales()) return;
  const Dtype dtype = Dtype(draw(0, 1));
  const quantized::DigitGemm& gemm = gemms.of[int(dtype)];
  const Rows rows(matrix, draw(1, 40));
  const int64_t panels = ceil_div(rows.rows * gemm.digits, int64_t(runtime::kAmxRows)),
                tile_bytes = panels * matrix.w.blocks() * 1024;
  const std::unique_ptr<float[]> factors(new float[size_t(rows.rows)]);
  const std::unique_ptr<char, void (*)(void*)> tiles(
      static_cast<char*>(std::aligned_alloc(64, size_t(tile_bytes))), std::free);
  const quantized::Digits x{factors.get(), tiles.get(), panels};
  const int64_t some = draw(0, panels), blocks = ceil_div(matrix.w.n, quantized::kDigitBlock),
                middle = draw(0, blocks);
  gemm.pack(rows.p, x, some, panels);
  gemm.pack(rows.p, x, 0, some);
  const runtime::KernelScope scope;
  gemm.run(rows.p, x, 0, middle);
  gemm.run(rows.p, x, middle, blocks);
  rows.compare_all("product of digits", dtype == Dtype::kFp32 ? 2e-6 : 2e-3);
}

void check_panels_on_tiles(const quantized::TilePanels& tiles, const Matrix& matrix) {
  const Rows rows(matrix, draw(1, 70));
  const quantized::Product& p = rows.p;
  const int64_t groups = p.w.blocks() * 2, slices = draw(1, 3), panels = p.w.n / p.w.panel_rows;
  const int64_t each = ceil_div(groups, 4 * slices) * 4;
  quantized::PanelSlice slice{Dtype(draw(0, 1)),           0,     0,    0, groups,
                              tiles.tile_rows[draw(0, 4)], false, false};
  if (slice.tile_rows == 0) slice.tile_rows = runtime::kAmxRows;
  slice.rounded = slice.dtype == Dtype::kBf16 && slice.tile_rows == 16 && draw(0, 1);
  for (slice.row = 0; slice.row < p.rows; slice.row += slice.rows) {
    slice.rows = draw(1, p.rows - slice.row);
    for (slice.from = 0; slice.from < groups; slice.from += each) {
      slice.count = std::min(each, groups - slice.from);
      std::vector<Line> x(size_t(slice.tiles() * slice.tile_bytes() / 64)),
          scratch(size_t(slice.scratch_bytes() / 64));
      auto* const packed = reinterpret_cast<char*>(x.data());
      const int64_t middle = draw(0, slice.tiles()), panel = draw(0, panels);
      tiles.pack(p, slice, packed, 0, middle);
      tiles.pack(p, slice, packed, middle, slice.tiles());
      for (const auto& [from, to] : {std::pair{int64_t(0), panel}, std::pair{panel, panels}})
        tiles.run(p, slice, packed, from, to, reinterpret_cast<char*>(scratch.data()));
    }
  }
  rows.compare_all("product with panels on tiles", slice.dtype == Dtype::kFp32 ? 2e-6 : 2e-2);
}

// Values of x differ so little that digits represent them as exactly as the type does.
void check_panel_digits(const quantized::PanelDigits& kernels, const Matrix& matrix) {
  const Rows rows(matrix, draw(1, 40), 0);
  const int64_t panels = matrix.w.n / matrix.w.panel_rows, middle = draw(0, panels);
  const int digits = int(draw(quantized::kMinDigits, quantized::kMaxDigits)),
            index = digits - quantized::kMinDigits;
  const std::unique_ptr<char[]> x(
      new char[size_t(rows.rows * kernels.row_bytes(matrix.w, digits))]);
  kernels.pack[index](rows.p, x.get());
  kernels.run[index](rows.p, x.get(), middle, panels);
  kernels.run[index](rows.p, x.get(), 0, middle);
  rows.compare_all("product of digits and panels", digits == quantized::kMinDigits ? 2e-3 : 2e-6);
}

// x is quantized, too. The error of a value is at most 1/254 of the largest one in its group.
void check_dynamic(runtime::Isa isa, const Matrix& matrix) {
  if (matrix.w.bits == 8 && !matrix.w.has_row_scales()) return;
  Rows rows(matrix, draw(1, 70));
  std::vector<uint8_t> values = matrix.values;
  std::vector<float> scales = matrix.scales;
  std::vector<int8_t> zeros = matrix.zeros;
  quantized::Weight& w = rows.p.w;
  w.values = values.data(), w.scales = scales.data(), w.zeros = w.zeros ? zeros.data() : nullptr;
  quantized::interleave(w.bits, values.data(), scales.data(), w.zeros ? zeros.data() : nullptr, w.n,
                        w.row_bytes(), w.groups(), quantized::kDynamicPanel, int(draw(1, 3)));
  const std::string before = runtime::requested_isa();
  runtime::request_isa(runtime::name_of(isa));
  (w.bits == 4 ? quantized::multiply_dynamic_int4 : quantized::multiply_dynamic)(rows.p,
                                                                                 int(draw(1, 3)));
  runtime::request_isa(before);
  rows.compare_all("dynamic product", 2e-2);
}

using Widen = decltype(quantized::Kernels::widen);

void check_widening(const Widen& widen, const Matrix& matrix) {
  const Dtype dtype = Dtype(draw(0, 1));
  const int64_t step = matrix.w.panel_rows ? matrix.w.panel_rows : 1, all = matrix.w.n / step,
                first = draw(0, all - 1), from = step * first, to = step * draw(first + 1, all);
  const Values wide(dtype, (to - from) * matrix.w.k, 0);
  widen[int(dtype)](matrix.w, from, to, wide.bytes.get());
  for (int64_t n = from; n < to; ++n)
    for (int64_t k = 0; k < matrix.w.k; ++k) {
      const double expected = matrix.at(n, k);
      compare("widened weight", wide[(n - from) * matrix.w.k + k], expected,
              std::abs(expected) * std::ldexp(1, dtype == Dtype::kFp32 ? -22 : -8) + 1e-6);
    }
}

}  // namespace

void check_quantized(runtime::Isa isa) {
  const quantized::Kernels& kernels = quantized::kernels(isa);
  const Matrix rows(0);
  check_dynamic(isa, rows);
  const gemm::AmxGemm* const tiles = quantized::amx_gemm(isa);
  if (tiles && rows.w.bits == 8) check_tiles(*tiles, rows);
  if (const quantized::TilePanels* const panels = quantized::tile_panels(isa)) {
    const Matrix matrix(quantized::kTilePanelRows);
    check_panels_on_tiles(*panels, matrix);
  }
  if (const quantized::DigitGemms* const gemms = quantized::digit_gemms(isa))
    check_digits(*gemms, rows);
  if (const quantized::PanelDigits* const panels = quantized::panel_digits(isa)) {
    const Matrix matrix(quantized::kTilePanelRows);
    check_panel_digits(*panels, matrix);
    check_widening(panels->widen, matrix);
  }
  if (!kernels.fp32.run) return;
  check_gemv(kernels, kernels.fp32, rows, 2e-6);
  if (kernels.pairs.run) check_gemv(kernels, kernels.pairs, rows, 2e-2);
  const quantized::DigitGemv* const gemv = quantized::digit_gemv(isa);
  if (gemv && rows.w.bits == 8 && rows.w.has_row_scales()) {
    const int digits = int(draw(quantized::kMinDigits, quantized::kMaxGemvDigits));
    check_gemv(kernels, gemv->of[digits - quantized::kMinDigits], rows,
               digits == quantized::kMinDigits ? 2e-3 : 2e-6, digits);
  }
  check_widening(kernels.widen, rows);
  if (!kernels.panels.run) return;
  const Matrix panels(quantized::kPanelRows);
  check_gemv(kernels, kernels.panels, panels, 2e-6);
  check_widening(kernels.widen_panels, panels);
}

// Checks of the operator: apply, heads, merge, and products of tiles.
#include "check_operator.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "atmm/operator.h"
#include "random_values.h"
#include "variants.h"

using namespace vlora;
using namespace vlora::atmm;

namespace {

// Memory aligned to a cache line.
struct Aligned {
  explicit Aligned(size_t bytes) : data(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  void* data;
};

// Chooses the built-in tile, or the same configuration for every shape.
struct RandomChooser : Chooser {
  TileConfig config;
  bool uses_built_in, has_fixed_order;
  TileConfig choose(const Shape& shape) const override {
    return uses_built_in ? built_in(shape) : config;
  }
  bool fixed_order() const override { return has_fixed_order; }
};

RandomChooser chooser(Operation operation) {
  const auto& all = configurations(operation);
  RandomChooser result;
  result.config = all[size_t(draw(0, int64_t(all.size()) - 1))];
  result.uses_built_in = draw(0, 1);
  result.has_fixed_order = draw(0, 3) == 0;
  return result;
}

[[noreturn]] void fail(const char* what, const Kernels& kernels, double got, double want) {
  std::printf("%s on %s: %g instead of %g\n", what, kernels.name, got, want);
  std::exit(1);
}

// Whether these variants compute a block of rows.
constexpr bool chooses(const BlockTraits& traits, RowSource rows, Variant shrink, Variant expand) {
  const Variants variants = variants_of(traits);
  return variants.rows == rows && variants.shrink == shrink && variants.expand == expand;
}
//                     rows   bf16   pairs  tiles readable one_panel fixed_order
static_assert(chooses({1, false, false, false, true, false, false}, RowSource::kInPlace,
                      Variant::kPrefetching, Variant::kPrefetching));
static_assert(chooses({64, false, false, false, true, false, false}, RowSource::kInPlace,
                      Variant::kDirect, Variant::kPacked));
static_assert(chooses({64, false, false, false, true, true, false}, RowSource::kInPlace,
                      Variant::kPrefetching, Variant::kPacked));
static_assert(chooses({64, true, true, false, false, false, false}, RowSource::kCopiedByPieces,
                      Variant::kPacked, Variant::kPacked));
static_assert(chooses({4, true, false, false, false, false, false}, RowSource::kCopied,
                      Variant::kPrefetching, Variant::kPrefetching));
static_assert(chooses({64, true, false, false, false, false, false}, RowSource::kCopiedByPieces,
                      Variant::kWidened, Variant::kWidened));
static_assert(chooses({kMinTileUnitRows - 1, true, true, true, true, false, false},
                      RowSource::kInPlace, Variant::kPrefetching, Variant::kPrefetching));
static_assert(chooses({kMinTileUnitRows, true, true, true, true, false, false}, RowSource::kInPlace,
                      Variant::kTileUnit, Variant::kTileUnit));
static_assert(chooses({1, true, true, true, true, false, true}, RowSource::kInPlace,
                      Variant::kTileUnit, Variant::kTileUnit));
static_assert(chooses({1, false, false, false, true, false, true}, RowSource::kInPlace,
                      Variant::kDirect, Variant::kPacked));

}  // namespace

void check_apply(const Kernels& kernels, Dtype dtype, Dtype rows_dtype, bool large) {
  const int64_t d_in = large ? any_of<int64_t>({1500, 2001}) : any_of<int64_t>({1, 3, 16, 65, 300});
  const int64_t pad = draw(0, 2);
  const int outputs = large ? 1 : int(draw(1, 3)), slots = int(draw(1, 3));
  std::vector<Output> out;
  int64_t width = 0;
  for (int o = 0; o < outputs; ++o) {
    out.push_back({large ? 700 : any_of<int64_t>({1, 16, 37, 128}), width});
    width += out.back().d_out;
  }
  const int bundle = any_of({1, 2, kMaxBundle});
  std::vector<Values> as, bs;
  std::vector<std::unique_ptr<Aligned>> packed;
  std::vector<Pair> pairs;
  for (int i = 0; i < slots * outputs; ++i) {
    const int64_t positive_rank =
        large ? any_of<int64_t>({8, 40, 64, 260}) : any_of<int64_t>({1, 7, 8, 16, 24, 33, 64, 260});
    const int64_t rank = draw(0, 5) ? positive_rank : 0;
    const int64_t d_out = out[size_t(i % outputs)].d_out;
    as.emplace_back(dtype, rank * d_in, float(1 / std::sqrt(double(d_in))));
    bs.emplace_back(dtype, d_out * rank, rank ? float(1 / std::sqrt(double(rank))) : 1.0f);
    if (!rank) {
      pairs.push_back({0, nullptr, nullptr});
      continue;
    }
    for (const auto& [n, k, from] :
         {std::make_tuple(rank, d_in, &as.back()), std::make_tuple(d_out, rank, &bs.back())}) {
      const bool first = from == &as.back();
      packed.push_back(std::make_unique<Aligned>(packed_bytes(n, k, dtype, first)));
      pack(packed.back()->data, from->bytes.get(), n, k, k, 1, dtype, bundle, first);
    }
    pairs.push_back({int32_t(rank), packed[packed.size() - 2]->data, packed.back()->data});
  }
  std::vector<Segment> list;
  int64_t rows = draw(0, 1);
  for (int64_t i = draw(0, 4); i > 0; --i) {
    const int64_t length = large ? draw(1, 20) : any_of<int64_t>({0, 1, 2, 8, 9, 40});
    list.push_back({rows, length, int32_t(draw(0, slots - 1)), draw(0, 1) ? 1 : -1});
    if (draw(0, 1)) list.push_back({rows, length, int32_t(draw(0, slots - 1)), -1});
    rows += length;
  }
  const int64_t x_stride = d_in + pad, y_stride = width + pad;
  // Memory ends with the last column of the last row: nothing may be read or written beyond it.
  const Values x(rows_dtype, rows ? (rows - 1) * x_stride + d_in : 0, 1);
  Values y(rows_dtype, rows ? (rows - 1) * y_stride + width : 0, 1);
  std::vector<double> want(y.count);
  for (size_t i = 0; i < y.count; ++i) want[i] = y[int64_t(i)];
  for (const Segment& s : list)
    for (int o = 0; o < outputs; ++o) {
      const size_t at = size_t(s.slot * outputs + o);
      const int64_t rank = pairs[at].rank;
      for (int64_t row = s.start; row < s.start + s.length; ++row)
        for (int64_t r = 0; r < rank; ++r) {
          double low = 0;
          for (int64_t k = 0; k < d_in; ++k) low += x[row * x_stride + k] * as[at][r * d_in + k];
          for (int64_t n = 0; n < out[size_t(o)].d_out; ++n)
            want[size_t(row * y_stride + out[size_t(o)].column + n)] +=
                s.sign * low * bs[at][n * rank + r];
        }
    }
  Problem p{dtype,    rows_dtype, rows,       d_in,  x.bytes.get(), x_stride, y.bytes.get(),
            y_stride, outputs,    out.data(), slots, pairs.data(),  bundle};
  apply(kernels, p, SegmentList(list), chooser(Operation::kApply), int(draw(1, 4)));
  const double tolerance = dtype == Dtype::kFp32 ? 1e-4 : 0.15;
  for (size_t i = 0; i < y.count; ++i)
    if (!(std::abs(y[int64_t(i)] - want[i]) < tolerance))
      fail("apply", kernels, y[int64_t(i)], want[i]);
}

void check_heads(const Kernels& kernels) {
  const int64_t d_in = any_of<int64_t>({3, 64}), classes = any_of<int64_t>({1, 20, 300}),
                rows = draw(1, 20);
  const Values w(Dtype::kFp32, classes * d_in, 0.1f), bias(Dtype::kFp32, classes, 1);
  const Values x(Dtype::kFp32, rows * d_in, 1), y(Dtype::kFp32, rows * classes, 1);
  const Aligned packed(packed_bytes(classes, d_in, Dtype::kFp32, true));
  pack(packed.data, w.bytes.get(), classes, d_in, d_in, 1, Dtype::kFp32, kernels.bundle, true);
  const Output out{1, 0};
  const Pair pair{int32_t(classes), packed.data, bias.bytes.get()};
  const Problem p{Dtype::kFp32,
                  Dtype::kFp32,
                  rows,
                  d_in,
                  x.bytes.get(),
                  d_in,
                  y.bytes.get(),
                  classes,
                  1,
                  &out,
                  1,
                  &pair,
                  kernels.bundle};
  heads(kernels, p, SegmentList({{0, rows, 0, 1}}));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t n = 0; n < classes; ++n) {
      double want = bias[n];
      for (int64_t k = 0; k < d_in; ++k) want += x[row * d_in + k] * w[n * d_in + k];
      if (!(std::abs(y[row * classes + n] - want) < 1e-4))
        fail("heads", kernels, y[row * classes + n], want);
    }
}

void check_merge(const Kernels& kernels, Dtype dtype) {
  const int64_t d_out = any_of<int64_t>({1, 7, 50}), d_in = any_of<int64_t>({1, 40, 320});
  const int64_t rank = any_of<int64_t>({1, 8, 33, 300});
  const Values in(dtype, d_out * d_in, 1), a(Dtype::kFp32, rank * d_in, 0.3f);
  const Values b(Dtype::kFp32, d_out * rank, 0.3f);
  const Aligned out(size_t(d_out * d_in) * size_of(dtype));
  const bool in_place = draw(0, 1);
  if (in_place) std::memcpy(out.data, in.bytes.get(), in.count * size_of(dtype));
  const Merge m{0,
                d_out,
                d_in,
                rank,
                reinterpret_cast<const float*>(a.bytes.get()),
                reinterpret_cast<const float*>(b.bytes.get())};
  merge(kernels, dtype, out.data, in_place ? out.data : in.bytes.get(), &m, 1, -1.0f,
        chooser(Operation::kMerge), int(draw(1, 2)));
  for (int64_t i = 0; i < d_out * d_in; ++i) {
    double want = in[i];
    for (int64_t r = 0; r < rank; ++r) want -= b[i / d_in * rank + r] * a[r * d_in + i % d_in];
    const double got =
        value_at(static_cast<const char*>(out.data) + size_t(i) * size_of(dtype), dtype);
    const double tolerance = dtype == Dtype::kFp32 ? 1e-4 : 1e-4 + std::abs(want) / 128;
    if (!(std::abs(got - want) < tolerance)) fail("merge", kernels, got, want);
  }
}

void check_tiles(const Kernels& kernels) {
  const int64_t steps = any_of<int64_t>({1, 5, 16, 40}), pad = draw(0, 2);
  const int rows = int(draw(1, runtime::kAmxBlockRows)),
            panels = int(draw(1, runtime::kAmxBlockPanels));
  const bool interleaved = draw(0, 1), first = draw(0, 1);
  const Values left(Dtype::kBf16, (rows - 1) * 2 * (steps + pad) + 2 * steps, 1);
  const Values right(Dtype::kBf16, panels * steps * 2 * kPanel, 1);
  runtime::TileProduct t{};
  t.left = left.bytes.get();
  t.left_bytes = 4 * (steps + pad);
  t.rows = rows;
  t.right = right.bytes.get();
  t.step_bytes = 64 * (interleaved ? panels : 1);
  t.panel_bytes = 64 * (interleaved ? 1 : steps);
  t.panels = panels;
  t.steps = steps;
  const ptrdiff_t stride = panels * kPanel + draw(0, 3);
  Values sums(Dtype::kFp32, (rows - 1) * stride + panels * kPanel, 1);
  std::vector<double> want(sums.count);
  for (size_t i = 0; i < sums.count; ++i) want[i] = sums[int64_t(i)];
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t n = 0; n < panels * kPanel; ++n) {
      double sum = first ? 0 : want[size_t(i * stride + n)];
      for (int64_t k = 0; k < 2 * steps; ++k) {
        const int64_t step = k / 2, at = step * t.step_bytes + n / kPanel * t.panel_bytes;
        sum += left[i * 2 * (steps + pad) + k] * right[at / 2 + n % kPanel * 2 + k % 2];
      }
      want[size_t(i * stride + n)] = sum;
    }
  t.out = reinterpret_cast<float*>(sums.bytes.get());
  t.out_stride = stride;
  t.first = first;
  kernels.tiles->multiply(t);
  for (size_t i = 0; i < sums.count; ++i)
    if (!(std::abs(sums[int64_t(i)] - want[i]) < 1e-3))
      fail("tiles", kernels, sums[int64_t(i)], want[i]);
}

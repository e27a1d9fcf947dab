// Checks of attention, matrix products and the elementwise kernels against double precision.
#include "check_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "gemm/gemm.h"
#include "random_values.h"

using namespace vlora;

namespace {

std::vector<float> normal(int64_t count) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(random_bits());
  return values;
}

void fail(const char* what, double got, double want) {
  std::printf("%s: %g instead of %g\n", what, got, want);
  std::exit(1);
}

// Returns the value rounded to `dtype`.
float rounded(float value, Dtype dtype) {
  if (dtype == Dtype::kFp32) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Stores a value, rounded to `dtype`, as element `index` of an array.
void put(char* array, int64_t index, float value, Dtype dtype) {
  uint32_t bits;
  const float stored = rounded(value, dtype);
  std::memcpy(&bits, &stored, 4);
  if (dtype == Dtype::kFp32) {
    std::memcpy(array + 4 * index, &bits, 4);
  } else {
    const uint16_t half = uint16_t(bits >> 16);
    std::memcpy(array + 2 * index, &half, 2);
  }
}

// Returns x [dim] with rotary embedding: both halves rotated by the angles of a position.
std::vector<float> rotated(const float* x, int64_t dim, const float* cosines, const float* sines) {
  std::vector<float> result(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim / 2; ++i) {
    result[size_t(i)] = x[i] * cosines[i] - x[i + dim / 2] * sines[i];
    result[size_t(i + dim / 2)] = x[i + dim / 2] * cosines[i] + x[i] * sines[i];
  }
  return result;
}

}  // namespace

void check_attention(runtime::Isa isa) {
  const Dtype dtype = Dtype(draw(0, 1));
  if (!attention::kernels(isa).attend[int(dtype)]) return;  // AMX has no fp32 kernels
  const int64_t block = any_of<int64_t>({1, 3, 16, 32, 48}), kv_heads = any_of<int64_t>({1, 2, 3}),
                group = any_of<int64_t>({1, 2, 4, 7}), dim = any_of<int64_t>({8, 16, 48, 64, 80}),
                heads = kv_heads * group;
  std::vector<attention::Chunk> chunks;
  int64_t rows = 0, pages = 0;
  for (int64_t i = draw(1, 4); i > 0; --i) {
    const int64_t length = any_of<int64_t>({1, 1, 1, 5, 50}),
                  start = any_of<int64_t>({0, 15, 16, 33, 150});
    chunks.push_back({rows, length, start, pages});
    rows += length;
    pages += ceil_div(start + length, block);
  }
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random_bits());
  attention::Layout layout{dtype, block, kv_heads, dim, 0, pages};
  layout.page = 2 * layout.values();
  // NaN marks memory that is never written; if heads are padded, zeros do.
  const int64_t count = pages * layout.page;
  std::vector<char> cache(static_cast<size_t>(count) * size_of(dtype));
  const bool padded = layout.padded() != dim;
  for (int64_t i = 0; i < count; ++i)
    put(cache.data(), i, padded ? 0 : std::numeric_limits<float>::quiet_NaN(), dtype);

  const int64_t width = (heads + 2 * kv_heads) * dim;
  const std::vector<float> q = normal(rows * width);
  const std::vector<float> cosines = normal(rows * dim / 2), sines = normal(rows * dim / 2);
  std::vector<std::vector<float>> keys, values;  // of each chunk: [positions, kv_heads, dim]
  for (const attention::Chunk& chunk : chunks) {
    const int64_t end = chunk.start + chunk.length;
    keys.push_back(normal(end * kv_heads * dim));
    values.push_back(normal(end * kv_heads * dim));
    for (int64_t position = 0; position < end; ++position)
      for (int64_t head = 0; head < kv_heads; ++head) {
        float* const key = &keys.back()[size_t((position * kv_heads + head) * dim)];
        float* const value = &values.back()[size_t((position * kv_heads + head) * dim)];
        if (position >= chunk.start) {
          const int64_t row = chunk.row + position - chunk.start;
          const float* const own = q.data() + row * width + (heads + head) * dim;
          const auto own_key =
              rotated(own, dim, &cosines[size_t(row * dim / 2)], &sines[size_t(row * dim / 2)]);
          std::copy(own_key.begin(), own_key.end(), key);
          std::copy(own + kv_heads * dim, own + (kv_heads + 1) * dim, value);
        }
        const int64_t slot = position % block;
        const int64_t panel = table[size_t(chunk.first_page + position / block)] * layout.page +
                              head * layout.head() + slot / kLanes * layout.panel();
        for (int64_t d = 0; d < dim; ++d) {
          key[d] = rounded(key[d], dtype);
          value[d] = rounded(value[d], dtype);
          if (position >= chunk.start) continue;
          // bf16 keys and values are stored as pairs.
          const int64_t pair = dtype == Dtype::kBf16 ? 2 : 1, lane = slot % kLanes;
          put(cache.data(), panel + d / pair * pair * kLanes + lane * pair + d % pair, key[d],
              dtype);
          put(cache.data(),
              panel + layout.values() + lane / pair * pair * layout.padded() + d * pair +
                  lane % pair,
              value[d], dtype);
        }
      }
  }

  const int threads = int(draw(1, 3));
  const attention::Plan plan(layout, heads, chunks, table, threads);
  std::vector<float> y(static_cast<size_t>(rows * heads * dim),
                       std::numeric_limits<float>::quiet_NaN());
  const float scale = 1 / std::sqrt(float(dim));
  const attention::Problem problem{&plan,       cache.data(),   q.data(),     width, y.data(),
                                   heads * dim, cosines.data(), sines.data(), scale};
  attention::attend(attention::kernels(isa), problem, threads);

  for (size_t i = 0; i < chunks.size(); ++i)
    for (int64_t r = 0; r < chunks[i].length; ++r)
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t row = chunks[i].row + r, seen = chunks[i].start + r + 1, own = head / group;
        const auto query = rotated(q.data() + row * width + head * dim, dim,
                                   &cosines[size_t(row * dim / 2)], &sines[size_t(row * dim / 2)]);
        std::vector<double> weights;
        for (int64_t p = 0; p < seen; ++p) {
          double score = 0;
          for (int64_t d = 0; d < dim; ++d)
            score += double(query[size_t(d)]) * keys[i][size_t((p * kv_heads + own) * dim + d)];
          weights.push_back(score * scale);
        }
        const double most = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (double& weight : weights) sum += weight = std::exp(weight - most);
        for (int64_t d = 0; d < dim; ++d) {
          double want = 0;
          for (int64_t p = 0; p < seen; ++p)
            want += weights[size_t(p)] / sum * values[i][size_t((p * kv_heads + own) * dim + d)];
          const double got = y[size_t((row * heads + head) * dim + d)];
          // A key that bf16 rounds differently changes its weight slightly.
          const double tolerance = dtype == Dtype::kFp32 ? 1e-4 : 2e-2;
          if (!(std::abs(got - want) < tolerance)) fail("attention", got, want);
        }
      }
}

void check_product(runtime::Isa isa) {
  const gemm::Kernels& kernels = gemm::kernels(isa);
  const Dtype dtype = draw(0, 1) ? Dtype::kFp32 : Dtype::kBf16;
  if (!kernels.gemv[int(dtype)]) return;
  const int64_t rows = any_of<int64_t>({1, 2, 3, 4, 5, 6, 8, 12, 13, 16, 24, 33, 66}),
                n = draw(1, 120);
  const int64_t k = any_of<int64_t>({draw(1, 40), draw(1, 300), 600}), x_stride = k + draw(0, 3),
                y_stride = n + draw(0, 3);
  const std::vector<float> x = normal((rows - 1) * x_stride + k), bias = normal(n);
  std::vector<float> w = normal(n * k), y(size_t((rows - 1) * y_stride + n));
  const std::unique_ptr<char[]> stored(new char[size_t(n * k) * size_of(dtype)]);
  for (int64_t i = 0; i < n * k; ++i)
    put(stored.get(), i, w[size_t(i)] = rounded(w[size_t(i)], dtype), dtype);
  const bool biased = draw(0, 1);
  // Tiles of AMX if it runs here, otherwise its plain C++ equivalent.
  const gemm::AmxGemm* tiles =
      gemm::amx_gemm(isa == runtime::Isa::kAvx512Bf16 ? runtime::Isa::kAmx : runtime::Isa::kTwin);
  if (draw(0, 1)) tiles = nullptr;
  gemm::multiply(kernels, tiles,
                 {dtype, stored.get(), n, k, x.data(), rows, x_stride, y.data(), y_stride,
                  biased ? bias.data() : nullptr},
                 int(draw(1, 3)));
  // Products of bf16 pairs round x.
  const bool exact = dtype == Dtype::kFp32 || (isa != runtime::Isa::kAvx512Bf16 && !tiles);
  const double each = std::ldexp(1, exact ? -21 : -8);
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < n; ++i) {
      double want = biased ? bias[size_t(i)] : 0, sizes = 0;
      for (int64_t at = 0; at < k; ++at) {
        const double product = double(x[size_t(t * x_stride + at)]) * w[size_t(i * k + at)];
        want += product, sizes += std::abs(product);
      }
      const double got = y[size_t(t * y_stride + i)],
                   tolerance = each * sizes + 1e-5 * std::sqrt(double(k));
      if (!(std::abs(got - want) < tolerance)) fail("product", got, want);
    }
}

void check_elementwise(runtime::Isa isa) {
  const gemm::Kernels& kernels = gemm::kernels(isa);
  if (!kernels.add_norm) return;
  const int64_t rows = draw(0, 5), width = draw(1, 300);
  const int threads = int(draw(1, 3));
  const std::vector<float> before = normal(rows * width), delta = normal(rows * width),
                           weight = normal(width);
  std::vector<float> hidden = before, out(before.size());
  gemm::add_norm(kernels,
                 {hidden.data(), delta.data(), weight.data(), out.data(), rows, width, 1e-5f},
                 threads);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = row * width; i < (row + 1) * width; ++i)
      squares += std::pow(double(before[size_t(i)]) + delta[size_t(i)], 2);
    const double factor = 1 / std::sqrt(squares / double(width) + 1e-5);
    for (int64_t i = 0; i < width; ++i) {
      const size_t at = size_t(row * width + i);
      const double want = (double(before[at]) + delta[at]) * factor * weight[size_t(i)];
      if (!(std::abs(out[at] - want) < 1e-4)) fail("add_norm", out[at], want);
    }
  }
  const std::vector<float> x = normal(rows * 2 * width);
  gemm::gate(kernels, {x.data(), out.data(), rows, width}, threads);
  for (int64_t i = 0; i < rows * width; ++i) {
    const int64_t at = i / width * 2 * width + i % width;
    const double gate = x[size_t(at)], want = gate / (1 + std::exp(-gate)) * x[size_t(at + width)];
    if (!(std::abs(out[size_t(i)] - want) < 1e-4)) fail("gate", out[size_t(i)], want);
  }
  const auto feature = reinterpret_cast<int64_t>(weight.data());
  std::vector<int64_t> tokens(static_cast<size_t>(rows)), replacements(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    tokens[size_t(row)] = draw(0, rows - 1);
    replacements[size_t(row)] = draw(0, 2) ? 0 : feature;
  }
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    const std::unique_ptr<char[]> table(new char[before.size() * size_of(dtype)]);
    for (size_t i = 0; i < before.size(); ++i) put(table.get(), int64_t(i), before[i], dtype);
    gemm::embed(kernels,
                {dtype, table.get(), tokens.data(), replacements.data(), out.data(), rows, width},
                threads);
    for (int64_t i = 0; i < rows * width; ++i) {
      const size_t row = size_t(i / width), at = size_t(tokens[row] * width + i % width);
      const float word = rounded(before[at], dtype);
      const float want = replacements[row] ? weight[size_t(i % width)] : word;
      if (out[size_t(i)] != want) fail("embed", out[size_t(i)], want);
    }
  }
  std::vector<int64_t> indices(static_cast<size_t>(rows));
  const std::unique_ptr<bool[]> finite(new bool[size_t(rows)]);
  gemm::argmax(kernels, {before.data(), indices.data(), finite.get(), rows, width}, threads);
  for (int64_t row = 0; row < rows; ++row) {
    const auto begin = before.begin() + row * width;
    const auto want = std::max_element(begin, begin + width) - begin;
    if (!finite[size_t(row)] || indices[size_t(row)] != want)
      fail("largest", double(indices[size_t(row)]), double(want));
  }
}

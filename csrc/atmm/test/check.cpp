// Random problems through every instruction set of this CPU, against double precision, and the team of
// threads. Meant for builds with sanitizers (test/sanitize.py): every buffer is exactly as large as its
// contents.
//
//     check [rounds] [own | openmp]
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "atmm/operator.h"
#include "check_attention.h"
#include "runtime/dispatch.h"
#include "runtime/large_pages.h"
#include "runtime/threads.h"
#include "path.h"

using namespace vlora;
using namespace vlora::atmm;

namespace {

std::mt19937_64 random_bits{std::random_device{}()};

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

template <class T>
T any_of(std::initializer_list<T> values) {
  return values.begin()[draw(0, int64_t(values.size()) - 1)];
}

float value_at(const char* p, Dtype dtype) {
  float value;
  if (dtype == Dtype::kFp32) {
    std::memcpy(&value, p, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t bits = uint32_t(half) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A buffer of `count` random values, to the byte.
struct Values {
  Dtype dtype;
  size_t count;
  std::unique_ptr<char[]> bytes;

  Values(Dtype type, int64_t n, float scale)
      : dtype(type), count(size_t(n)), bytes(new char[std::max<size_t>(1, count * size_of(type))]) {
    std::normal_distribution<float> normal(0, scale);
    for (size_t i = 0; i < count; ++i) {
      const float value = normal(random_bits);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      const uint16_t half = uint16_t(bits >> 16);
      if (dtype == Dtype::kFp32)
        std::memcpy(&bytes[i * 4], &value, 4);
      else
        std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  double operator[](int64_t i) const { return value_at(&bytes[size_t(i) * size_of(dtype)], dtype); }
};

struct Aligned {
  explicit Aligned(size_t bytes) : at(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  ~Aligned() { std::free(at); }
  Aligned(const Aligned&) = delete;
  void* at;
};

struct Fixed : Chooser {
  TileConfig config;
  bool built, ordered;
  TileConfig choose(const Shape& shape) const override {
    return built ? built_in(shape) : config;
  }
  bool one_order() const override { return ordered; }
};

Fixed chooser(Operation operation) {
  const auto& all = configurations(operation);
  Fixed result;
  result.config = all[size_t(draw(0, int64_t(all.size()) - 1))];
  result.built = draw(0, 1);
  result.ordered = draw(0, 3) == 0;
  return result;
}

[[noreturn]] void fail(const char* what, const Kernels& kernels, double got, double want) {
  std::printf("%s on %s: %g, not %g\n", what, kernels.name, got, want);
  std::exit(1);
}

// large: enough work for several threads, few rows. rows_dtype: of x and y.
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
    const int64_t some = large ? any_of<int64_t>({8, 40, 64, 260})
                               : any_of<int64_t>({1, 7, 8, 16, 24, 33, 64, 260});
    const int64_t rank = draw(0, 5) ? some : 0;
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
      pack(packed.back()->at, from->bytes.get(), n, k, k, 1, dtype, bundle, first);
    }
    pairs.push_back({int32_t(rank), packed[packed.size() - 2]->at, packed.back()->at});
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
  // The last row ends where its columns end: nothing may be read or written past it.
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
    if (!(std::abs(y[int64_t(i)] - want[i]) < tolerance)) fail("apply", kernels, y[int64_t(i)], want[i]);
}

void check_heads(const Kernels& kernels) {
  const int64_t d_in = any_of<int64_t>({3, 64}), classes = any_of<int64_t>({1, 20, 300}), rows = draw(1, 20);
  const Values w(Dtype::kFp32, classes * d_in, 0.1f), bias(Dtype::kFp32, classes, 1);
  const Values x(Dtype::kFp32, rows * d_in, 1), y(Dtype::kFp32, rows * classes, 1);
  const Aligned packed(packed_bytes(classes, d_in, Dtype::kFp32, true));
  pack(packed.at, w.bytes.get(), classes, d_in, d_in, 1, Dtype::kFp32,
       kernels.bundle, true);
  const Output out{1, 0};
  const Pair pair{int32_t(classes), packed.at, bias.bytes.get()};
  const Problem p{Dtype::kFp32, Dtype::kFp32, rows, d_in, x.bytes.get(), d_in, y.bytes.get(), classes,
                  1, &out, 1, &pair, kernels.bundle};
  heads(kernels, p, SegmentList({{0, rows, 0, 1}}));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t n = 0; n < classes; ++n) {
      double want = bias[n];
      for (int64_t k = 0; k < d_in; ++k) want += x[row * d_in + k] * w[n * d_in + k];
      if (!(std::abs(y[row * classes + n] - want) < 1e-4)) fail("heads", kernels, y[row * classes + n], want);
    }
}

void check_merge(const Kernels& kernels, Dtype dtype) {
  const int64_t d_out = any_of<int64_t>({1, 7, 50}), d_in = any_of<int64_t>({1, 40, 320});
  const int64_t rank = any_of<int64_t>({1, 8, 33, 300});
  const Values in(dtype, d_out * d_in, 1), a(Dtype::kFp32, rank * d_in, 0.3f);
  const Values b(Dtype::kFp32, d_out * rank, 0.3f);
  const Aligned out(size_t(d_out * d_in) * size_of(dtype));
  const bool in_place = draw(0, 1);
  if (in_place) std::memcpy(out.at, in.bytes.get(), in.count * size_of(dtype));
  const Merge m{0, d_out, d_in, rank, reinterpret_cast<const float*>(a.bytes.get()),
                reinterpret_cast<const float*>(b.bytes.get())};
  merge(kernels, dtype, out.at, in_place ? out.at : in.bytes.get(), &m, 1, -1.0f,
        chooser(Operation::kMerge), int(draw(1, 2)));
  for (int64_t i = 0; i < d_out * d_in; ++i) {
    double want = in[i];
    for (int64_t r = 0; r < rank; ++r) want -= b[i / d_in * rank + r] * a[r * d_in + i % d_in];
    const double got = value_at(static_cast<const char*>(out.at) + size_t(i) * size_of(dtype), dtype);
    const double tolerance = dtype == Dtype::kFp32 ? 1e-4 : 1e-4 + std::abs(want) / 128;
    if (!(std::abs(got - want) < tolerance)) fail("merge", kernels, got, want);
  }
}

// What a unit that multiplies tiles is for: packed panels on the right (of any bundle), rows as they lie
// on the left; or a matrix as it lies on the left, and a few packed rows on the right.
void check_tiles(const Kernels& kernels) {
  const int64_t steps = any_of<int64_t>({1, 5, 16, 40}), pad = draw(0, 2);
  const int rows = int(draw(1, runtime::kTileRows)), panels = int(draw(1, runtime::kTilePanels));
  const bool together = draw(0, 1), first = draw(0, 1);
  const Values left(Dtype::kBf16, (rows - 1) * 2 * (steps + pad) + 2 * steps, 1);
  const Values right(Dtype::kBf16, panels * steps * 2 * kPanel, 1);
  runtime::TileProduct t{};
  t.left = left.bytes.get();
  t.left_bytes = 4 * (steps + pad);
  t.rows = rows;
  t.right = right.bytes.get();
  t.step_bytes = 64 * (together ? panels : 1);
  t.panel_bytes = 64 * (together ? 1 : steps);
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
  if (draw(0, 1)) kernels.tiles->release();
  for (size_t i = 0; i < sums.count; ++i)
    if (!(std::abs(sums[int64_t(i)] - want[i]) < 1e-3)) fail("tiles", kernels, sums[int64_t(i)], want[i]);
}

// Regions of changing size, some of which fail, from two callers at once.
void check_threads(int rounds) {
  const auto caller = [rounds] {
    for (int round = 0; round < rounds; ++round) {
      const int threads = 1 + round % 5, failing = round % 7;
      std::vector<int> once(100, 0);
      runtime::share_out(threads, 100, [&](int64_t piece) { ++once[size_t(piece)]; });
      for (int count : once)
        if (count != 1) std::exit(2);
      std::atomic<int> met{0};
      auto meet = [&](const runtime::Team& team) {
        met += 1;
        team.wait();
        if (met != team.threads) std::exit(3);
        team.wait();
        if (team.thread == failing) throw 1;
        team.wait();
      };
      bool thrown = false;
      try {
        runtime::run_on(threads, meet);
      } catch (int) {
        thrown = true;
      }
      if (thrown != (failing < met)) std::exit(4);
    }
  };
  std::thread other(caller);
  caller();
  other.join();
}

// Two threads take and give pieces; each keeps what its owner wrote, and none is left over.
void check_large_pages(int rounds) {
  const auto owner = [rounds](int seed) {
    std::mt19937 bits(static_cast<unsigned>(seed));
    struct Piece {
      std::shared_ptr<char> memory;
      size_t bytes;
      char value;
    };
    std::vector<Piece> pieces;
    for (int round = 0; round < rounds; ++round) {
      const size_t bytes = 1 + bits() % (round % 16 ? 200000 : 20000000);
      pieces.push_back({runtime::in_large_pages(bytes), bytes, char(bits())});
      std::memset(pieces.back().memory.get(), pieces.back().value, bytes);
      if (pieces.size() < 8) continue;
      std::swap(pieces[bits() % pieces.size()], pieces.back());
      const Piece& last = pieces.back();
      for (size_t i = 0; i < last.bytes; ++i)
        if (last.memory.get()[i] != last.value) std::exit(5);
      pieces.pop_back();
    }
  };
  const size_t before = runtime::large_pages().pieces;
  std::thread other(owner, 1);
  owner(2);
  other.join();
  if (runtime::large_pages().pieces != before) std::exit(6);
}

// Which way a block of rows goes.
constexpr bool goes(const Facts& facts, RowsIn rows, Path shrink, Path expand) {
  const Paths paths = paths_of(facts);
  return paths.rows == rows && paths.shrink == shrink && paths.expand == expand;
}
//                  rows   bf16   pairs  tiles readable packing one_panel one_order
static_assert(goes({1, false, false, false, true, false, false, false}, RowsIn::kPlace, Path::kStream,
                   Path::kStream));
static_assert(goes({64, false, false, false, true, false, false, false}, RowsIn::kPlace, Path::kDirect,
                   Path::kPacked));
static_assert(goes({64, false, false, false, true, false, true, false}, RowsIn::kPlace, Path::kStream,
                   Path::kPacked));
static_assert(goes({64, false, false, false, true, true, false, false}, RowsIn::kPieces, Path::kPacked,
                   Path::kPacked));
static_assert(goes({4, true, false, false, false, false, false, false}, RowsIn::kCopy, Path::kStream,
                   Path::kStream));
static_assert(goes({64, true, false, false, false, false, false, false}, RowsIn::kPieces, Path::kWidened,
                   Path::kWidened));
static_assert(goes({kTileUnitRows - 1, true, true, true, true, false, false, false}, RowsIn::kPlace,
                   Path::kStream, Path::kStream));
static_assert(goes({kTileUnitRows, true, true, true, true, false, false, false}, RowsIn::kPlace,
                   Path::kTiles, Path::kTiles));
static_assert(goes({1, true, true, true, true, false, false, true}, RowsIn::kPlace, Path::kTiles,
                   Path::kTiles));
static_assert(goes({1, false, false, false, true, false, false, true}, RowsIn::kPlace, Path::kDirect,
                   Path::kPacked));

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  const bool borrowed = argc > 2 && !std::strcmp(argv[2], "openmp");
  if (!runtime::use_threads(borrowed ? runtime::Source::kOpenMp : runtime::Source::kOwn)) {
    std::printf("no OpenMP in this process\n");
    return 1;
  }
  check_threads(10 * rounds);
  check_large_pages(rounds);
  for (int i = runtime::kIsas - 1; i >= 0; --i) {
    if (!runtime::runs_here(runtime::Isa(i))) {
      std::printf("%s: not run, this CPU lacks it\n", runtime::name_of(runtime::Isa(i)));
      continue;
    }
    const Kernels& here = kernels(runtime::Isa(i));
    const auto run = [&] {
      for (int round = 0; round < rounds; ++round)
        for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
          check_apply(here, dtype, dtype, round % 8 == 0);
          if (dtype == Dtype::kBf16) check_apply(here, dtype, Dtype::kFp32, round % 8 == 0);
          check_merge(here, dtype);
          check_heads(here);
          if (here.tiles) check_tiles(here);
          check_attention(runtime::Isa(i));
          check_product(runtime::Isa(i));
          check_between(runtime::Isa(i));
        }
    };
    std::thread(run).join();  // a thread's scratch is freed with it: the leak check sees that
    std::printf("%s: %d rounds on %s threads\n", here.name, rounds, borrowed ? "OpenMP's" : "own");
  }
}

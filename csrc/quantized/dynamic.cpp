#include "quantized/dynamic.h"

#include <atomic>

#include "quantized/pieces.h"
#include "runtime/dispatch.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::quantized {
namespace {

// Fewest rows of x that are multiplied by tiles. VNNI is faster for fewer.
constexpr int64_t kMinTileRows = 12;

const DynamicKernels& current_kernels(int64_t rows) {
  const runtime::Isa isa = runtime::isa(Dtype::kBf16);
  const bool tiles = isa == runtime::Isa::kTwin || isa == runtime::Isa::kAmx;
  return *dynamic_kernels(tiles && rows >= kMinTileRows ? isa : isa_of_bytes());
}

}  // namespace

runtime::Isa isa_of_bytes() {
  using runtime::Isa;
  const Isa isa = runtime::isa(Dtype::kBf16);
  if (isa > Isa::kAvx2) return multiplies_bytes() ? Isa::kAvx512 : Isa::kAvx2;
  return isa == Isa::kTwin ? Isa::kScalar : isa;
}

bool multiplies_bytes() {
  return runtime::isa(Dtype::kBf16) > runtime::Isa::kAvx2 && __builtin_cpu_supports("avx512vnni");
}

void multiply_dynamic(const Product& p, int threads) {
  if (p.rows <= 0 || p.w.n <= 0) return;
  const DynamicKernels& kernels = current_kernels(p.rows);
  DynamicRows x{};
  x.tiles = ceil_div(p.rows, kernels.tile_rows);
  x.blocks = p.w.blocks();
  x.groups = ceil_div(x.blocks * kBlock, kDynamicGroup);
  // Tile registers may read one line beyond the last.
  const int64_t line_floats = (p.rows * x.blocks + 1) * kernels.line_bytes / 4;
  static thread_local runtime::LargeScratch scratch;
  float* const memory = scratch.get(line_floats + 2 * p.rows * x.groups);
  x.lines = reinterpret_cast<char*>(memory);
  x.units = memory + line_floats;
  x.offsets = reinterpret_cast<int32_t*>(x.units + p.rows * x.groups);
  pack_parts(p.rows, x.tiles, threads,
             [&](int64_t from, int64_t until) { kernels.pack(p, x, from, until); });
  in_pieces(threads, ceil_div(p.w.n, kDynamicPanel), panels_of_piece(p.w, threads),
            [&](int64_t from, int64_t to) { kernels.run(p, x, from, to); });
}

double multiply_bytes(int64_t rounds, int threads) {
  const DynamicKernels& kernels = current_kernels(kMinTileRows);
  std::atomic<int64_t> operations{0};
  auto work = [&](const runtime::Team&) { operations += int64_t(kernels.peak(rounds)); };
  runtime::run_on(threads, work);
  return double(operations);
}

}  // namespace vlora::quantized

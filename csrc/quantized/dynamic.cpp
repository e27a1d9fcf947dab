#include "quantized/dynamic.h"

#include <algorithm>
#include <atomic>

#include "quantized/pieces.h"
#include "runtime/dispatch.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::quantized {
namespace {

// Bytes of W in a piece. Reading them from memory takes about 5 µs.
constexpr int64_t kPieceBytes = 64 << 10;
// Maximum number of panels that a kernel multiplies together.
constexpr int64_t kTogether = 4;

// Fewest rows of x that are multiplied by tiles. VNNI is faster for fewer.
constexpr int64_t kMinTileRows = 12;

const DynamicKernels& current_kernels(int64_t rows) {
  using runtime::Isa;
  Isa isa = runtime::isa(Dtype::kBf16);
  if (rows < kMinTileRows && isa == Isa::kTwin) isa = Isa::kScalar;
  if (isa > Isa::kAvx2 && (rows < kMinTileRows || isa != Isa::kAmx))
    isa = multiplies_bytes() ? Isa::kAvx512 : Isa::kAvx2;
  return *dynamic_kernels(isa);
}

}  // namespace

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
  const int64_t panels = ceil_div(p.w.n, kDynamicPanel),
                share = ceil_div(panels, int64_t(threads) * 8),
                fitting = kPieceBytes / (kDynamicPanel * std::max<int64_t>(1, p.w.row_bytes()));
  const int64_t each =
      std::max<int64_t>(1, ceil_div(std::min(share, fitting), kTogether)) * kTogether;
  in_pieces(threads, panels, each, [&](int64_t from, int64_t to) { kernels.run(p, x, from, to); });
}

double multiply_bytes(int64_t rounds, int threads) {
  const DynamicKernels& kernels = current_kernels(kMinTileRows);
  std::atomic<int64_t> operations{0};
  auto work = [&](const runtime::Team&) { operations += int64_t(kernels.peak(rounds)); };
  runtime::run_on(threads, work);
  return double(operations);
}

}  // namespace vlora::quantized

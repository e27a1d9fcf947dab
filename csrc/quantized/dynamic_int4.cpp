#include "quantized/dynamic_int4.h"

#include "quantized/pieces.h"
#include "runtime/dispatch.h"
#include "runtime/scratch.h"

namespace vlora::quantized {
namespace {

// Bytes of W in a piece. Reading them from memory takes about 5 µs.
constexpr int64_t kPieceBytes = 64 << 10;
// Maximum number of panels that a kernel multiplies together.
constexpr int64_t kTogether = 4;

const Int4Kernels& current_kernels() {
  using runtime::Isa;
  Isa isa = runtime::isa(Dtype::kBf16);
  if (isa == Isa::kTwin) isa = Isa::kScalar;
  if (isa > Isa::kAvx2) isa = multiplies_bytes() ? Isa::kAvx512 : Isa::kAvx2;
  return *int4_kernels(isa);
}

}  // namespace

void multiply_dynamic_int4(const Product& p, int threads) {
  if (p.rows <= 0 || p.w.n <= 0) return;
  const Int4Kernels& kernels = current_kernels();
  Int4Rows x{};
  x.tiles = ceil_div(p.rows, kernels.tile_rows);
  x.group = dynamic_group(p.w);
  x.groups = p.w.blocks() * kBlock / x.group;
  static thread_local runtime::LargeScratch scratch;
  x.packed = reinterpret_cast<char*>(scratch.get(p.rows * x.row_bytes() / 4));
  pack_parts(p.rows, x.tiles, threads,
             [&](int64_t from, int64_t until) { kernels.pack(p, x, from, until); });
  const int64_t panels = ceil_div(p.w.n, kDynamicPanel),
                share = ceil_div(panels, int64_t(threads) * 8),
                fitting = kPieceBytes / (kDynamicPanel * std::max<int64_t>(1, p.w.row_bytes()));
  const int64_t each =
      std::max<int64_t>(1, ceil_div(std::min(share, fitting), kTogether)) * kTogether;
  in_pieces(threads, panels, each, [&](int64_t from, int64_t to) { kernels.run(p, x, from, to); });
}

}  // namespace vlora::quantized

#include "quantized/dynamic_int4.h"

#include "quantized/pieces.h"
#include "runtime/scratch.h"

namespace vlora::quantized {
void multiply_dynamic_int4(const Product& p, int threads) {
  if (p.rows <= 0 || p.w.n <= 0) return;
  const Int4Kernels& kernels = *int4_kernels(isa_of_bytes());
  Int4Rows x{};
  x.tiles = ceil_div(p.rows, kernels.tile_rows);
  x.group = dynamic_group(p.w);
  x.groups = p.w.blocks() * kBlock / x.group;
  static thread_local runtime::LargeScratch scratch;
  x.packed = reinterpret_cast<char*>(scratch.get(p.rows * x.row_bytes() / 4));
  pack_parts(p.rows, x.tiles, threads,
             [&](int64_t from, int64_t until) { kernels.pack(p, x, from, until); });
  in_pieces(threads, ceil_div(p.w.n, kDynamicPanel), panels_of_piece(p.w, threads),
            [&](int64_t from, int64_t to) { kernels.run(p, x, from, to); });
}

}  // namespace vlora::quantized

#include "linear/linear.h"

#include <algorithm>

#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace vlora::linear {
namespace {

constexpr int64_t kPieceBytes = 64 << 10;
// Of W, for few rows: some microseconds of memory.
constexpr int64_t kCopyRows = 65;
// From so many on copying blocks of W costs less than what its rows' common stride does.
constexpr int64_t kTileUnitRows = 4;
// From so many on a unit that multiplies tiles takes a bf16 matrix, as ATMM's does (atmm/cpu/path.h).
constexpr int64_t kTiledRows = 4 * cpu::kTileRows;
// Most rows of W in a piece for it.
static_assert(kTiledRows * kPanels * kLanes <= kScratch, "their sums must fit");
constexpr int64_t kShareRows = 64;
// From so many on packing x is worth being shared.
constexpr int64_t kRowsFloats = 1 << 15;
// Of what is done row by row in one piece: some ten microseconds, several times what waking costs.

constexpr int64_t kAloneElements = 1 << 14, kAloneProducts = 1 << 18;
// Of W, and with all rows: some microseconds, less than it takes to wake another thread.

float* row_scratch(int64_t floats) {
  static thread_local cpu::Scratch scratch;
  return scratch.get(floats);
}

float* block_scratch() {
  static thread_local cpu::Scratch scratch;
  return scratch.get(kScratch);
}

// Pieces are taken one ahead, so that the next one's rows of W can be fetched. done: after a thread's
// last.
template <class PieceOf, class Work, class Done>
void run(int threads, int64_t count, const PieceOf& piece_of, const Work& work, const Done& done) {
  cpu::Pieces pieces(count);
  auto take = [&](const cpu::Team&) {
    for (int64_t now = pieces.take(); now >= 0;) {
      const int64_t next = pieces.take();
      Piece piece = piece_of(now);
      piece.next = next < 0 ? -1 : piece_of(next).from;
      work(piece);
      now = next;
    }
    done();
  };
  cpu::run_late(int(std::min<int64_t>(threads, count)), take);
}

void few(const Kernels& kernels, const Product& p, int threads) {
  const int type = int(p.dtype);
  const float* x = p.x;
  ptrdiff_t stride = p.x_stride;
  if (kernels.pack_few[type]) {
    stride = ceil_div(p.k, 2 * kLanes) * 2 * kLanes;
    float* to = row_scratch(stride * p.rows);
    kernels.pack_few[type](p, to, 0, p.rows);
    x = to;
  }
  const int64_t share = ceil_div(p.n, int64_t(threads) * 8);
  const int64_t bytes = kPieceBytes / std::max<int64_t>(1, p.k * int64_t(size_of(p.dtype)));
  const int64_t each = std::max<int64_t>(4, std::min(share, bytes) / 4 * 4);
  run(
      threads, ceil_div(p.n, each),
      [&](int64_t i) {
        return Piece{i * each, std::min(p.n, (i + 1) * each), 0, 0, -1};
      },
      [&](const Piece& piece) { kernels.few[type](p, x, stride, piece); }, [] {});
}

// All panels of x, in this thread's scratch.
float* packed(const Product& p, void (*pack)(const Product&, float*, int64_t, int64_t), int64_t floats,
              int threads) {
  const int64_t panels = ceil_div(p.rows, kLanes);
  float* const x = row_scratch(floats);
  if (p.rows < kShareRows) {
    pack(p, x, 0, panels);
  } else {
    cpu::share_out(threads, panels, [&](int64_t i) { pack(p, x, i, i + 1); });
  }
  return x;
}

void many(const Kernels& kernels, const Product& p, int threads) {
  const int type = int(p.dtype);
  const bool in_place = p.dtype == Dtype::kBf16 ? kernels.in_place[type].run && p.k % 2 == 0
                                                : p.rows < kCopyRows;
  const Many& form = (in_place ? kernels.in_place : kernels.copied)[type];
  const int64_t panels = ceil_div(p.rows, kLanes);
  const float* const x = packed(p, form.pack, panels * kLanes * p.k, threads);
  const int64_t parts = ceil_div(panels, kPanels), each = ceil_div(panels, parts);
  run(
      threads, ceil_div(p.n, kBlock) * parts,
      [&](int64_t i) {
        const int64_t from = i / parts * kBlock, panel = i % parts * each;
        return Piece{from, std::min(p.n, from + kBlock), panel, std::min(panels - panel, each), -1};
      },
      [&](const Piece& piece) { form.run(p, x, piece, block_scratch()); }, [] {});
}

// Rows of W, as they lie, are the unit's left side, and rows of x, in panels of pairs, its right one.
void tiled(const cpu::TileUnit& unit, const Kernels& kernels, const Product& p, int threads) {
  const int64_t panels = ceil_div(p.rows, kLanes), row = p.k * 2, panel_bytes = row * kLanes;
  const auto* const w = static_cast<const char*>(p.w);
  const auto* const x =
      reinterpret_cast<const char*>(packed(p, kernels.pack_pairs, panels * kLanes * p.k / 2, threads));
  const int64_t parts = ceil_div(panels, kPanels), each = ceil_div(panels, parts);
  const int64_t rows =
      std::clamp<int64_t>(kPieceBytes / row / cpu::kTileRows * cpu::kTileRows, cpu::kTileRows, kTiledRows);
  run(
      threads, ceil_div(p.n, rows) * parts,
      [&](int64_t i) {
        const int64_t from = i / parts * rows, panel = i % parts * each;
        return Piece{from, std::min(p.n, from + rows), panel, std::min(panels - panel, each), -1};
      },
      [&](const Piece& piece) {
        float* const sums = block_scratch();
        const ptrdiff_t stride = piece.panels * kLanes;
        for (int64_t n = piece.from; n < piece.to; n += cpu::kTileRows)
          for (int64_t panel = 0; panel < piece.panels; panel += cpu::kTilePanels)
            unit.multiply({w + n * row, row, int(std::min<int64_t>(cpu::kTileRows, piece.to - n)),
                           x + (piece.panel + panel) * panel_bytes, kLanes * 4, panel_bytes,
                           int(std::min<int64_t>(cpu::kTilePanels, piece.panels - panel)), p.k / 2,
                           sums + (n - piece.from) * stride + panel * kLanes, stride, true});
        kernels.store(p, piece, sums, stride, kLanes);
      },
      unit.release);
}

// Rows in pieces of about kRowsFloats, by the caller alone where that is all there is.
template <class Work>
void by_rows(int threads, int64_t rows, int64_t width, const Work& work) {
  const int64_t each = std::max<int64_t>(1, kRowsFloats / std::max<int64_t>(1, width));
  if (rows <= each) {
    work(0, rows);
    return;
  }
  cpu::share_out(threads, ceil_div(rows, each),
                 [&](int64_t i) { work(i * each, std::min(rows, (i + 1) * each)); });
}

}  // namespace

void add_norm(const Kernels& kernels, const Norm& norm, int threads) {
  by_rows(threads, norm.rows, norm.width,
          [&](int64_t from, int64_t until) { kernels.add_norm(norm, from, until); });
}

void gate(const Kernels& kernels, const Gate& gate, int threads) {
  // An exponential function costs about as much as four loads and stores.
  by_rows(threads, gate.rows, 4 * gate.width,
          [&](int64_t from, int64_t until) { kernels.gate(gate, from, until); });
}

void largest(const Kernels& kernels, const Largest& largest, int threads) {
  by_rows(threads, largest.rows, largest.width,
          [&](int64_t from, int64_t until) { kernels.largest(largest, from, until); });
}

void sample(const Kernels& kernels, const Sample& sample, int threads) {
  cpu::share_out(threads, sample.count, [&](int64_t i) { kernels.sample(sample, i, i + 1); });
}

void multiply(const Kernels& kernels, const cpu::TileUnit* tiles, const Product& product, int threads) {
  if (product.rows <= 0 || product.n <= 0) return;
  const int64_t elements = product.n * product.k;
  if (elements <= kAloneElements && elements * product.rows <= kAloneProducts) threads = 1;
  if (tiles && product.dtype == Dtype::kBf16 && product.k % 2 == 0 && product.k > 0 &&
      product.rows >= kTileUnitRows) {
    tiled(*tiles, kernels, product, threads);
  } else if (product.rows <= kFewRows) {
    few(kernels, product, threads);
  } else {
    many(kernels, product, threads);
  }
}

}  // namespace vlora::linear

#include "gemm/gemm.h"

#include <immintrin.h>

#include <algorithm>

#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::gemm {
namespace {

constexpr int64_t kPieceBytes = 64 << 10;
// Of W, for few rows: some microseconds of memory.
constexpr int64_t kCopyRows = 65;
// From so many on copying blocks of W costs less than what its rows' common stride does.
constexpr int64_t kTileUnitRows[kDtypes] = {49, 2};
// From so many on a unit that multiplies tiles takes a matrix: one row is read faster as one stream, and fp32's
// limbs take longer to make than few rows by vectors.
constexpr int64_t kPartBytes[kDtypes] = {5 << 18, 3 << 19}, kSlicePanels = 16, kMostPanels = 32;
// Of x in a part that meets all of W: of the 2 MiB of L2 that machines with such a unit have, less where more of W
// and more sums pass by.
constexpr int64_t kGatedPanels = 4;
// So many of the whole depth have to fit a part, or the gate is not worth W's being read for each.
constexpr int64_t kShareRows = 64;
// From so many on packing x is worth being shared.
constexpr int64_t kRowsFloats = 1 << 15;
// Of what is done row by row in one piece: some ten microseconds, several times what waking costs.

constexpr int64_t kAloneElements = 1 << 14, kAloneProducts = 1 << 18;
// Of W, and with all rows: some microseconds, less than it takes to wake another thread.

// Of rows of x, packed.
float* row_scratch(int64_t floats) {
  static thread_local runtime::LargeScratch scratch;
  return scratch.get(floats);
}

float* block_scratch() {
  static thread_local runtime::Scratch scratch;
  return scratch.get(kScratch);
}

// Of pieces that `threads` threads take in turn, as they do, each gets neighbours: two streams through W that
// are far apart. A permutation of 0 … count - 1.
int64_t apart(int64_t piece, int64_t count, int64_t threads) {
  const int64_t of = piece % threads, longer = count % threads;
  return of * (count / threads) + std::min(of, longer) + piece / threads;
}

// Pieces are taken one ahead, so that the next one's rows of W can be fetched. done: after a thread's
// last.
template <class PieceOf, class Work, class Done>
void run(int threads, int64_t count, const PieceOf& piece_of, const Work& work, const Done& done) {
  runtime::Pieces pieces(count);
  auto take = [&](const runtime::Team&) {
    for (int64_t now = pieces.take(); now >= 0;) {
      const int64_t next = pieces.take();
      Piece piece = piece_of(now);
      piece.next = next < 0 ? -1 : piece_of(next).from;
      work(piece);
      now = next;
    }
    done();
  };
  runtime::run_late(int(std::min<int64_t>(threads, count)), take);
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
  const int64_t count = ceil_div(p.n, each);
  run(
      threads, count,
      [&](int64_t i) {
        const int64_t from = apart(i, count, threads) * each;
        return Piece{from, std::min(p.n, from + each), 0, 0};
      },
      [&](const Piece& piece) { kernels.few[type](p, x, stride, piece); }, [] {});
}

// All panels of x, in this thread's scratch: pack(to, first panel, end).
template <class Pack>
float* packed(const Product& p, int64_t floats, int threads, const Pack& pack) {
  const int64_t panels = ceil_div(p.rows, kLanes);
  float* const x = row_scratch(floats);
  if (p.rows < kShareRows) {
    pack(x, 0, panels);
  } else {
    runtime::share_out(threads, panels, [&](int64_t i) { pack(x, i, i + 1); });
  }
  return x;
}

void many(const Kernels& kernels, const Product& p, int threads) {
  const int type = int(p.dtype);
  const bool in_place = p.dtype == Dtype::kBf16 ? kernels.in_place[type].run && p.k % 2 == 0
                                                : !kernels.copied[type].run || p.rows < kCopyRows;
  const Many& form = (in_place ? kernels.in_place : kernels.copied)[type];
  const int64_t panels = ceil_div(p.rows, kLanes);
  const float* const x = packed(p, panels * kLanes * p.k, threads, [&](float* to, int64_t from, int64_t end) {
    form.pack(p, to, from, end);
  });
  const int64_t parts = ceil_div(panels, kPanels), each = ceil_div(panels, parts);
  const int64_t blocks = ceil_div(p.n, kBlock);
  run(
      threads, blocks * parts,
      [&](int64_t i) {
        const int64_t from = apart(i / parts, blocks, threads) * kBlock, panel = i % parts * each;
        return Piece{from, std::min(p.n, from + kBlock), panel, std::min(panels - panel, each)};
      },
      [&](const Piece& piece) { form.run(p, x, piece, block_scratch()); }, [] {});
}

int64_t limbs(const Product& p) { return p.dtype == Dtype::kFp32 ? runtime::kLimbs : 1; }

// Bytes of a panel of x, so deep.
int64_t panel_of(const Product& p, int64_t depth) { return ceil_div(depth, 32) * limbs(p) << 10; }

void by_tiles(const Tiled& tiled, const Product& p, const Slice& slice, int threads) {
  const int64_t panels = ceil_div(p.rows, kLanes), panel = panel_of(p, slice.count);
  const auto* const x = reinterpret_cast<const char*>(
      packed(p, panels * panel / 4, threads, [&](float* to, int64_t from, int64_t end) {
        tiled.pack[int(p.dtype)](p, slice, reinterpret_cast<char*>(to), from, end);
      }));
  const int64_t most = std::clamp<int64_t>(kPartBytes[int(p.dtype)] / panel / 2 * 2, 2, kMostPanels);
  const int64_t parts = ceil_div(panels, most), each = ceil_div(ceil_div(panels, parts), 2) * 2;
  const int64_t columns = p.gated ? p.n / 2 : p.n, block = p.gated ? runtime::kTile : runtime::kTileRows;
  const int64_t blocks = ceil_div(columns, block);
  // What the next slice adds to is better left in the caches.
  const bool past_caches = slice.count == p.k && p.rows * columns * 4 > runtime::machine().l2;
  // One part after the other: its panels stay in L2, and W is read again for the next one.
  run(
      threads, blocks * parts,
      [&](int64_t i) {
        const int64_t from = apart(i % blocks, blocks, threads) * block, panel = i / blocks * each;
        return Piece{from, std::min(columns, from + block), panel, std::min(panels - panel, each)};
      },
      [&](Piece& piece) {
        static thread_local runtime::Scratch scratch;
        const int64_t floats = kTiledScratch + each * kLanes * runtime::kTileRows;
        piece.past_caches = past_caches;
        tiled.run[int(p.dtype)](p, slice, x, piece, reinterpret_cast<char*>(scratch.get(floats)));
      },
      [&] {
        if (past_caches) _mm_sfence();
        tiled.release();
      });
}

// The depth in slices of which kSlicePanels panels fit a part.
void by_tiles(const Tiled& tiled, const Product& p, int threads) {
  const int64_t panels = std::min(ceil_div(p.rows, 2 * kLanes) * 2, kSlicePanels);
  const int64_t slices = ceil_div(panels * p.k * 2 * limbs(p) * kLanes, kPartBytes[int(p.dtype)]);
  const int64_t each = ceil_div(ceil_div(p.k, slices), 32) * 32;
  for (int64_t k = 0; k < p.k; k += each) by_tiles(tiled, p, {k, std::min(each, p.k - k)}, threads);
}

// Rows in pieces of about kRowsFloats, by the caller alone where that is all there is.
template <class Work>
void by_rows(int threads, int64_t rows, int64_t width, const Work& work) {
  const int64_t each = std::max<int64_t>(1, kRowsFloats / std::max<int64_t>(1, width));
  if (rows <= each) {
    work(0, rows);
    return;
  }
  runtime::share_out(threads, ceil_div(rows, each),
                 [&](int64_t i) { work(i * each, std::min(rows, (i + 1) * each)); });
}

}  // namespace

void embed(const Kernels& kernels, const Embedding& embedding, int threads) {
  by_rows(threads, embedding.rows, embedding.width,
          [&](int64_t from, int64_t until) { kernels.embed(embedding, from, until); });
}

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
  runtime::share_out(threads, sample.count, [&](int64_t i) { kernels.sample(sample, i, i + 1); });
}

namespace {

int worth(const Product& product, int threads) {
  const int64_t elements = product.n * product.k;
  return elements <= kAloneElements && elements * product.rows <= kAloneProducts ? 1 : threads;
}

bool takes(const Tiled* tiled, const Product& product) {
  return tiled && product.k > 0 && product.rows >= kTileUnitRows[int(product.dtype)];
}

}  // namespace

void multiply(const Kernels& kernels, const Tiled* tiled, const Product& product, int threads) {
  if (product.rows <= 0 || product.n <= 0) return;
  threads = worth(product, threads);
  if (takes(tiled, product)) {
    by_tiles(*tiled, product, threads);
  } else if (product.rows <= kFewRows) {
    few(kernels, product, threads);
  } else {
    many(kernels, product, threads);
  }
}

void multiply_gated(const Kernels& kernels, const Tiled* tiled, const Product& product, float* out,
                    int threads) {
  const int64_t panels = std::min(ceil_div(product.rows, kLanes), kGatedPanels);
  const bool whole = panels * panel_of(product, product.k) <= kPartBytes[int(product.dtype)];
  if (product.n > 0 && whole && takes(tiled, product)) {
    Product gated = product;
    gated.y = out;
    gated.y_stride = product.n / 2;
    gated.gated = true;
    by_tiles(*tiled, gated, {0, product.k}, worth(product, threads));
    return;
  }
  multiply(kernels, tiled, product, threads);
  gate(kernels, {product.y, out, product.rows, product.n / 2}, threads);
}

}  // namespace vlora::gemm

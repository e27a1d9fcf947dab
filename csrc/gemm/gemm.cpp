#include "gemm/gemm.h"

#include <immintrin.h>

#include <algorithm>

#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::gemm {
namespace {

// Bytes of W in a piece of a gemv. Reading them from memory takes about 5 µs.
constexpr int64_t kPieceBytes = 64 << 10;
// Minimum rows of x for which blocks of W in fp32 are copied to scratch. With fewer rows, the copy
// costs more than the cache misses of rows of W that are a power of two apart.
constexpr int64_t kMinCopyRows = 65;
// Minimum rows of x for which the tile unit is used, by type of W. A single row uses a gemv,
// because memory limits it. In fp32 with fewer rows, splitting the factors into limbs takes longer
// than multiplying them on vectors.
constexpr int64_t kMinAmxRows[kDtypes] = {49, 2};
// Maximum bytes of packed x in a part, by type of W. The panels of a part stay in L2 while all of W
// is read. Machines with a tile unit have 2 MiB of L2, and in fp32 W and the sums take more of it.
constexpr int64_t kPartBytes[kDtypes] = {5 << 18, 3 << 19};
// Number of panels that the depth of a slice is chosen for, and the maximum number in a part.
constexpr int64_t kSlicePanels = 16, kMaxPartPanels = 32;
// Minimum number of panels, of the whole depth, that must fit a part for a gated product to run in
// one pass. With fewer, reading W again for each part costs more than a separate gate.
constexpr int64_t kMinGatedPanels = 4;
// Minimum number of rows for which the threads share the packing of x.
constexpr int64_t kMinSharedPackRows = 64;
// Floats in a piece of a row-by-row operation. It takes some ten microseconds, several times as
// long as waking a thread.
constexpr int64_t kRowPieceFloats = 1 << 15;
// A product with at most this many elements of W, and at most this many multiply-adds, runs on the
// caller's thread. It takes a few microseconds, less than waking another thread.
constexpr int64_t kSerialElements = 1 << 14, kSerialProducts = 1 << 18;

// Returns this thread's memory for packed rows of x.
float* row_scratch(int64_t floats) {
  static thread_local runtime::LargeScratch scratch;
  return scratch.get(floats);
}

float* block_scratch() {
  static thread_local runtime::Scratch scratch;
  return scratch.get(kVectorScratch);
}

// Returns the index of the piece to compute when a thread has taken the number `taken` of `count`.
// If the threads take numbers in turn, the pieces of each thread are adjacent, so that it reads
// contiguous memory.
int64_t spread(int64_t taken, int64_t count, int64_t threads) {
  const int64_t thread = taken % threads, longer = count % threads;
  return thread * (count / threads) + std::min(thread, longer) + taken / threads;
}

// Calls work(piece) for all pieces. A thread takes its next piece early, so that its rows of W can
// be prefetched. done() runs on each thread after its last piece.
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
  runtime::run_independent(int(std::min<int64_t>(threads, count)), take);
}

void gemv(const Kernels& kernels, const Product& p, int threads) {
  const int type = int(p.dtype);
  const float* x = p.x;
  ptrdiff_t stride = p.x_stride;
  if (kernels.pack_gemv[type]) {
    stride = packed_stride(p.k);
    float* packed = row_scratch(stride * p.rows);
    kernels.pack_gemv[type](p, packed, 0, p.rows);
    x = packed;
  }
  const int64_t row_bytes = kStreams * p.k * int64_t(size_of(p.dtype)), rows = p.n / kStreams;
  const int64_t share = ceil_div(rows, int64_t(threads) * 8);
  const int64_t fitting = kPieceBytes / std::max<int64_t>(1, row_bytes);
  const int64_t each = std::max<int64_t>(1, std::min(share, fitting));
  const int64_t count = std::max<int64_t>(1, ceil_div(rows, each));
  run(
      threads, count,
      [&](int64_t i) {
        const int64_t from = spread(i, count, threads) * each;
        return Piece{from, std::min(rows, from + each), 0, 0};
      },
      [&](const Piece& piece) { kernels.gemv[type](p, x, stride, piece); }, [] {});
}

// Packs all panels of x into this thread's scratch. pack(to, first panel, end).
template <class Pack>
float* packed(const Product& p, int64_t floats, int threads, const Pack& pack) {
  const int64_t panels = ceil_div(p.rows, kLanes);
  float* const x = row_scratch(floats);
  if (p.rows < kMinSharedPackRows) {
    pack(x, 0, panels);
  } else {
    runtime::share_out(threads, panels, [&](int64_t i) { pack(x, i, i + 1); });
  }
  return x;
}

void gemm_by_vectors(const Kernels& kernels, const Product& p, int threads) {
  const int type = int(p.dtype);
  const bool in_place = p.dtype == Dtype::kBf16
                            ? kernels.in_place[type].run && p.k % 2 == 0
                            : !kernels.copied[type].run || p.rows < kMinCopyRows;
  const VectorGemm& kernel = (in_place ? kernels.in_place : kernels.copied)[type];
  const int64_t panels = ceil_div(p.rows, kLanes);
  const float* const x =
      packed(p, panels * kLanes * p.k, threads,
             [&](float* to, int64_t from, int64_t end) { kernel.pack(p, to, from, end); });
  const int64_t parts = ceil_div(panels, kMaxPiecePanels), each = ceil_div(panels, parts);
  const int64_t blocks = ceil_div(p.n, kBlockRows);
  const int64_t fitting = rows_in_l1(runtime::machine(), p.k * int64_t(size_of(p.dtype)));
  run(
      threads, blocks * parts,
      [&](int64_t i) {
        const int64_t from = spread(i / parts, blocks, threads) * kBlockRows,
                      panel = i % parts * each;
        Piece piece{from, std::min(p.n, from + kBlockRows), panel, std::min(panels - panel, each)};
        piece.rows_in_l1 = fitting;
        return piece;
      },
      [&](const Piece& piece) { kernel.run(p, x, piece, block_scratch()); }, [] {});
}

int64_t limbs_of(const Product& p) { return p.dtype == Dtype::kFp32 ? runtime::kLimbs : 1; }

// Returns the bytes of a packed panel of x of this depth.
int64_t panel_bytes(const Product& p, int64_t depth) {
  return ceil_div(depth, 32) * limbs_of(p) << 10;
}

void gemm_slice_by_tiles(const AmxGemm& amx, const Product& p, const Slice& slice, int threads) {
  const int64_t panels = ceil_div(p.rows, kLanes), panel = panel_bytes(p, slice.count);
  const auto* const x = reinterpret_cast<const char*>(
      packed(p, panels * panel / 4, threads, [&](float* to, int64_t from, int64_t end) {
        amx.pack[int(p.dtype)](p, slice, reinterpret_cast<char*>(to), from, end);
      }));
  const int64_t fitting =
      std::clamp<int64_t>(kPartBytes[int(p.dtype)] / panel / 2 * 2, 2, kMaxPartPanels);
  const int64_t parts = ceil_div(panels, fitting), each = ceil_div(ceil_div(panels, parts), 2) * 2;
  const int64_t columns = p.gated ? p.n / 2 : p.n,
                block = p.gated ? runtime::kAmxRows : runtime::kAmxBlockRows;
  const int64_t blocks = ceil_div(columns, block);
  // Sums to which the next slice is added must stay in the caches.
  const bool streaming = slice.count == p.k && p.rows * columns * 4 > runtime::machine().l2;
  // The parts run one after another. The panels of a part stay in L2, and W is read again for each
  // part.
  run(
      threads, blocks * parts,
      [&](int64_t i) {
        const int64_t from = spread(i % blocks, blocks, threads) * block, first = i / blocks * each;
        return Piece{from, std::min(columns, from + block), first, std::min(panels - first, each)};
      },
      [&](Piece& piece) {
        static thread_local runtime::Scratch scratch;
        const int64_t floats = kAmxScratch + each * kLanes * runtime::kAmxBlockRows;
        piece.streaming = streaming;
        amx.run[int(p.dtype)](p, slice, x, piece, reinterpret_cast<char*>(scratch.get(floats)));
      },
      [&] {
        if (streaming) _mm_sfence();
      });
}

// Divides the depth into slices, of which kSlicePanels panels fit a part.
void gemm_by_tiles(const AmxGemm& amx, const Product& p, int threads) {
  const int64_t panels = std::min(ceil_div(p.rows, 2 * kLanes) * 2, kSlicePanels);
  const int64_t slices =
      ceil_div(panels * p.k * 2 * limbs_of(p) * kLanes, kPartBytes[int(p.dtype)]);
  const int64_t each = ceil_div(ceil_div(p.k, slices), kSliceStep) * kSliceStep;
  for (int64_t k = 0; k < p.k; k += each)
    gemm_slice_by_tiles(amx, p, {k, std::min(each, p.k - k)}, threads);
}

// Calls work(first row, end) on pieces of about kRowPieceFloats, on the caller alone if there is
// only one.
template <class Work>
void by_rows(int threads, int64_t rows, int64_t width, const Work& work) {
  const int64_t each = std::max<int64_t>(1, kRowPieceFloats / std::max<int64_t>(1, width));
  if (rows <= each) {
    work(0, rows);
    return;
  }
  runtime::share_out(threads, ceil_div(rows, each),
                     [&](int64_t i) { work(i * each, std::min(rows, (i + 1) * each)); });
}

// Returns the number of threads that the product repays.
int useful_threads(const Product& product, int threads) {
  const int64_t elements = product.n * product.k;
  return elements <= kSerialElements && elements * product.rows <= kSerialProducts ? 1 : threads;
}

bool uses_tiles(const AmxGemm* amx, const Product& product) {
  return amx && product.k > 0 && product.rows >= kMinAmxRows[int(product.dtype)];
}

}  // namespace

const AmxGemm* amx_gemm_for(Dtype dtype) {
  // For fp32 the unit computes six products of bf16 and splits the factors into limbs. It is faster
  // if bf16's peak is at least this many times that of fp32.
  constexpr double kMinPeakRatio = 9;
  const runtime::Isa isa = runtime::isa(dtype);
  const AmxGemm* const amx = amx_gemm(isa);
  if (!amx || dtype == Dtype::kBf16 || isa == runtime::Isa::kTwin) return amx;
  return runtime::core_peak(isa, Dtype::kBf16) >
                 kMinPeakRatio * runtime::core_peak(isa, Dtype::kFp32)
             ? amx
             : nullptr;
}

void embed(const Kernels& kernels, const Embedding& embedding, int threads) {
  by_rows(threads, embedding.rows, embedding.width,
          [&](int64_t from, int64_t until) { kernels.embed(embedding, from, until); });
}

void add_norm(const Kernels& kernels, const Norm& norm, int threads) {
  by_rows(threads, norm.rows, norm.width,
          [&](int64_t from, int64_t until) { kernels.add_norm(norm, from, until); });
}

void head_norm(const Kernels& kernels, const HeadNorm& norm, int threads) {
  const int64_t normed = (norm.heads + norm.kv_heads) * norm.dim;
  by_rows(threads, norm.rows, normed, [&](int64_t from, int64_t until) {
    for (int64_t row = from; row < until; ++row) {
      float* const queries = norm.qkv + row * (normed + norm.kv_heads * norm.dim);
      float* const keys = queries + norm.heads * norm.dim;
      // The kernel reads each value before it writes it, so its output may be its input.
      kernels.add_norm(
          {queries, nullptr, norm.query_weight, queries, norm.heads, norm.dim, norm.eps}, 0,
          norm.heads);
      kernels.add_norm({keys, nullptr, norm.key_weight, keys, norm.kv_heads, norm.dim, norm.eps}, 0,
                       norm.kv_heads);
    }
  });
}

void gate(const Kernels& kernels, const Gate& gate, int threads) {
  // An exponential function costs as much as about four loads and stores.
  by_rows(threads, gate.rows, 4 * gate.width,
          [&](int64_t from, int64_t until) { kernels.gate(gate, from, until); });
}

void argmax(const Kernels& kernels, const Argmax& argmax, int threads) {
  by_rows(threads, argmax.rows, argmax.width,
          [&](int64_t from, int64_t until) { kernels.argmax(argmax, from, until); });
}

void sample(const Kernels& kernels, const Sample& sample, int threads) {
  runtime::share_out(threads, sample.count, [&](int64_t i) { kernels.sample(sample, i, i + 1); });
}

int64_t rows_in_l1(const runtime::Machine& machine, int64_t stride) {
  const int64_t line = machine.l1_line;
  const int64_t sets = std::max<int64_t>(1, machine.l1 / (machine.l1_ways * line));
  for (int64_t rows = 0; rows < kTallTile; ++rows) {
    int64_t in_its_set = 1;
    for (int64_t row = 0; row < rows; ++row)
      in_its_set += (rows * stride / line - row * stride / line) % sets == 0;
    if (in_its_set >= machine.l1_ways) return rows;
  }
  return kTallTile;
}

void multiply(const Kernels& kernels, const AmxGemm* amx, const Product& product, int threads) {
  if (product.rows <= 0 || product.n <= 0) return;
  threads = useful_threads(product, threads);
  if (uses_tiles(amx, product)) {
    gemm_by_tiles(*amx, product, threads);
  } else if (product.rows <= kernels.max_gemv_rows[int(product.dtype)]) {
    gemv(kernels, product, threads);
  } else {
    gemm_by_vectors(kernels, product, threads);
  }
}

void multiply_by_tiles(const AmxGemm& amx, const Product& product, int threads) {
  if (product.rows <= 0 || product.n <= 0 || product.k <= 0) return;
  gemm_by_tiles(amx, product, useful_threads(product, threads));
}

void multiply_gated(const Kernels& kernels, const AmxGemm* amx, const Product& product, float* out,
                    int threads) {
  const int64_t panels = std::min(ceil_div(product.rows, kLanes), kMinGatedPanels);
  const bool one_pass = panels * panel_bytes(product, product.k) <= kPartBytes[int(product.dtype)];
  if (product.n > 0 && one_pass && uses_tiles(amx, product)) {
    Product gated = product;
    gated.y = out;
    gated.y_stride = product.n / 2;
    gated.gated = true;
    gemm_slice_by_tiles(*amx, gated, {0, product.k}, useful_threads(product, threads));
    return;
  }
  multiply(kernels, amx, product, threads);
  gate(kernels, {product.y, out, product.rows, product.n / 2}, threads);
}

}  // namespace vlora::gemm

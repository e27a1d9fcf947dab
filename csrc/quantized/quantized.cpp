#include "quantized/quantized.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::quantized {
namespace {

// Bytes of W in a piece of a gemv. Reading them from memory takes about 5 µs.
constexpr int64_t kPieceBytes = 64 << 10;
// From this many rows of x on, a tile unit multiplies faster than a gemv, by type of the product.
constexpr int64_t kMinTileRows[kDtypes] = {8, 6};
// For these numbers of rows of x, a tile unit multiplies digits faster than other kernels multiply.
constexpr int64_t kMinDigitRows = 2, kMaxDigitRows = 64;
// Maximum bytes of packed digits, which stay in L2 while W is read, and bytes of a panel of digits for
// a block of depth.
constexpr int64_t kMaxDigitBytes = 1 << 20, kPanelBlockBytes = 1024;
// Maximum number of blocks of W in a piece of a product of digits.
constexpr int64_t kPieceBlocks = 8;
// From this many rows of x on, all threads multiply the same widened rows of W, so that x is packed
// once for all of them. For fewer, each thread widens and multiplies rows of its own.
constexpr int64_t kMinSharedRows = 64;
// Rows of W that are widened at a time: multiples of the rows in a block of a gemm, few enough to
// stay in half of L2, many enough to make the packing of x cheap.
constexpr int64_t kRowStep = gemm::kBlockRows, kMaxOwnRows = 4 * kRowStep;
// Bytes of widened rows that all threads multiply together.
constexpr int64_t kSharedBytes = 8 << 20;

// Calls work(from, to) for pieces of [0, count) on all threads. If the threads take numbers in
// turn, the pieces of each thread are adjacent, so that it reads contiguous memory.
template <class Work>
void in_pieces(int threads, int64_t count, int64_t each, const Work& work) {
  const int64_t pieces = std::max<int64_t>(1, ceil_div(count, each));
  const int64_t used = std::min<int64_t>(threads, pieces);
  runtime::share_out(int(used), pieces, [&](int64_t taken) {
    const int64_t thread = taken % used, longer = pieces % used;
    const int64_t piece = thread * (pieces / used) + std::min(thread, longer) + taken / used;
    work(piece * each, std::min(count, (piece + 1) * each));
  });
}

// Returns the product with rows [from, to) of W, which are at `w`, as a gemm takes it.
gemm::Product with_matrix(const Product& p, Dtype dtype, const void* w, int64_t from, int64_t to) {
  return {dtype,
          w,
          to - from,
          p.w.k,
          p.x,
          p.rows,
          p.x_stride,
          p.y + from,
          p.y_stride,
          p.bias ? p.bias + from : nullptr};
}

const Gemv& gemv_for(const Product& p, Dtype dtype, const Kernels& here) {
  if (p.w.panels) return here.panels;
  const Gemv& pairs = kernels(runtime::vector_isa(dtype)).pairs;
  return dtype == Dtype::kBf16 && p.rows > 1 && pairs.run ? pairs : here.fp32;
}

// Returns the gemm of the tile unit if it should multiply, else null.
const gemm::AmxGemm* tiles_for(const Product& p, Dtype dtype) {
  const bool represented = dtype == Dtype::kBf16 || (p.w.bits == 8 && p.w.has_row_scales());
  const bool possible = represented && !p.w.panels && p.w.k > 0;
  if (!possible || p.rows < kMinTileRows[int(dtype)] || !gemm::amx_gemm_for(dtype)) return nullptr;
  return amx_gemm(runtime::isa(dtype));
}

// Returns the gemm of digits if it should multiply, else null.
const DigitGemm* digits_for(const Product& p, Dtype dtype) {
  const bool some_rows = p.rows >= kMinDigitRows && p.rows <= kMaxDigitRows;
  const bool possible = some_rows && p.w.bits == 8 && p.w.has_row_scales() && p.w.k > 0 &&
                        p.w.k <= kMaxDigitDepth;
  const DigitGemms* const gemms = possible ? digit_gemms(runtime::isa(Dtype::kBf16)) : nullptr;
  if (!gemms) return nullptr;
  const DigitGemm& gemm = gemms->of[int(dtype)];
  const bool fits = p.rows * p.w.k * gemm.digits <= kMaxDigitBytes;
  return fits && gemm.is_exact(p) ? &gemm : nullptr;
}

void multiply_digits(const Product& p, const DigitGemm& gemm, int threads) {
  const int64_t panels = ceil_div(p.rows * gemm.digits, int64_t(runtime::kAmxRows));
  const int64_t factors = ceil_div(p.rows, int64_t(kLanes)) * kLanes;
  static thread_local runtime::LargeScratch scratch;
  float* const memory = scratch.get(factors + panels * p.w.blocks() * kPanelBlockBytes / 4);
  const Digits x{memory, reinterpret_cast<char*>(memory + factors), panels};
  if (p.rows < kMinSharedRows) {
    gemm.pack(p, x, 0, panels);
  } else {
    runtime::share_out(threads, panels, [&](int64_t i) { gemm.pack(p, x, i, i + 1); });
  }
  const int64_t blocks = ceil_div(p.w.n, kDigitBlock);
  const int64_t share = ceil_div(blocks, int64_t(threads) * 8);
  in_pieces(threads, blocks, std::max<int64_t>(1, std::min(share, kPieceBlocks)),
            [&](int64_t from, int64_t to) { gemm.run(p, x, from, to); });
}

}  // namespace

bool prefers_panels() {
  return kernels(runtime::vector_isa(Dtype::kFp32)).panels.run != nullptr;
}

void multiply(const Product& p, Dtype dtype, int threads) {
  if (p.rows <= 0 || p.w.n <= 0) return;
  const runtime::Isa isa = runtime::vector_isa(Dtype::kFp32);
  const Kernels& here = kernels(isa);
  if (p.w.panels && !here.panels.run)
    throw std::invalid_argument("weights in panels, which '" + std::string(name_of(isa)) +
                                "' cannot multiply; only avx2 can");
  if (const DigitGemm* const digits = digits_for(p, dtype)) {
    multiply_digits(p, *digits, threads);
    return;
  }
  if (const gemm::AmxGemm* const tiles = tiles_for(p, dtype)) {
    gemm::multiply_by_tiles(*tiles, with_matrix(p, dtype, &p.w, 0, p.w.n), threads);
    return;
  }
  if (p.rows <= here.max_gemv_rows) {
    const Gemv& gemv = gemv_for(p, dtype, here);
    const int64_t together = p.w.panels ? kPanelRows : gemm::kStreams;
    const int64_t rows = p.w.n / together, row_bytes = together * p.w.row_bytes();
    const int64_t share = ceil_div(rows, int64_t(threads) * 8);
    const int64_t least = p.w.panels ? kPanelsAtOnce : 1;
    const int64_t each =
        ceil_div(std::max<int64_t>(1, std::min(share, kPieceBytes / row_bytes)), least) * least;
    static thread_local runtime::LargeScratch scratch;
    float* const x = scratch.get(gemv_scratch(p));
    gemv.pack(p, x);
    in_pieces(threads, rows, each, [&](int64_t from, int64_t to) { gemv.run(p, x, from, to); });
    return;
  }
  const gemm::Kernels& products = gemm::kernels(runtime::vector_isa(dtype));
  const gemm::AmxGemm* const amx = gemm::amx_gemm_for(dtype);
  const auto widen = (p.w.panels ? here.widen_panels : here.widen)[int(dtype)];
  const int64_t row_bytes = p.w.k * int64_t(size_of(dtype));
  if (p.rows < kMinSharedRows) {
    const int64_t fitting = runtime::machine().l2 / 2 / row_bytes / kRowStep * kRowStep;
    const int64_t each = std::clamp(fitting, kRowStep, kMaxOwnRows);
    in_pieces(threads, p.w.n, each, [&](int64_t from, int64_t to) {
      static thread_local runtime::LargeScratch scratch;
      float* const w = scratch.get(ceil_div(each * row_bytes, 4));
      widen(p.w, from, to, w);
      gemm::multiply(products, amx, with_matrix(p, dtype, w, from, to), 1);
    });
    return;
  }
  const int64_t fitting = kSharedBytes / row_bytes / kRowStep * kRowStep;
  const int64_t each = std::min(p.w.n, std::max(kRowStep, fitting));
  static thread_local runtime::LargeScratch scratch;
  char* const w = reinterpret_cast<char*>(scratch.get(ceil_div(each * row_bytes, 4)));
  for (int64_t from = 0; from < p.w.n; from += each) {
    const int64_t to = std::min(p.w.n, from + each);
    runtime::share_out(threads, ceil_div(to - from, kRowStep), [&](int64_t i) {
      const int64_t row = from + i * kRowStep;
      widen(p.w, row, std::min(to, row + kRowStep), w + i * kRowStep * row_bytes);
    });
    gemm::multiply(products, amx, with_matrix(p, dtype, w, from, to), threads);
  }
}

}  // namespace vlora::quantized

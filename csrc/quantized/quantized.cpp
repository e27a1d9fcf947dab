#include "quantized/quantized.h"

#include <immintrin.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "quantized/pieces.h"
#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::quantized {
namespace {

// From this many rows of x on, a tile unit multiplies faster than a gemv, by type of the product.
constexpr int64_t kMinTileRows[kDtypes] = {8, 6};
// For these numbers of rows of x, a tile unit multiplies digits faster than other kernels multiply.
constexpr int64_t kMinDigitRows = 2, kMaxDigitRows = 64;
// Up to this many rows, as many digits as for fp32 are as fast as bf16.
constexpr int64_t kMaxRowsOfMoreDigits = 16;
// Maximum bytes of packed digits, which stay in L2 while W is read. Bytes of a panel of digits for
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

// A tile unit multiplies W in panels by parts of x. A part has at most this many rows, by type of
// the product. Enough of its depth then fits into L2, and W is converted only once for many rows.
constexpr int64_t kMaxPartRows[kDtypes] = {128, 256};
// Up to this many rows of x, W in panels is multiplied with digits by vectors: with any number of
// digits, and with fewer than kMaxDigits.
constexpr int64_t kMaxRowsOfAllDigits = 16, kMaxPanelDigitRows = 32;
// From this many rows of x on, a tile unit multiplies weights in panels in bf16 faster if they are
// rounded to bf16.
constexpr int64_t kMinRoundedRows = 49;

// Returns the product with rows [from, to) of W, which are at `w`, as a gemm takes it.
gemm::Product with_matrix(const Product& p, Dtype dtype, const void* w, int64_t from, int64_t to) {
  return {dtype,  w,          to - from,  p.w.k,      p.x,
          p.rows, p.x_stride, p.y + from, p.y_stride, p.bias ? p.bias + from : nullptr};
}

const Gemv& gemv_for(const Product& p, Dtype dtype, const Kernels& here) {
  if (p.w.panel_rows) return here.panels;
  const Gemv& pairs = kernels(runtime::vector_isa(dtype)).pairs;
  return dtype == Dtype::kBf16 && p.rows > 1 && pairs.run ? pairs : here.fp32;
}

// Returns the gemm of the tile unit if it should multiply, else null.
const gemm::AmxGemm* tiles_for(const Product& p, Dtype dtype) {
  const bool represented = dtype == Dtype::kBf16 || p.w.has_row_scales();
  if (!represented || p.w.bits != 8 || p.w.k <= 0 || p.rows < kMinTileRows[int(dtype)] ||
      !gemm::amx_gemm_for(dtype))
    return nullptr;
  return amx_gemm(runtime::isa(dtype));
}

// Returns whether bytes of W can be multiplied with digits of x.
bool may_use_digits(const Weight& w) {
  return w.bits == 8 && w.has_row_scales() && w.k > 0 && w.k <= kMaxDigitDepth;
}

// Returns the gemm of digits if it should multiply, else null.
const DigitGemm* digits_for(const Product& p, Dtype dtype) {
  const bool some_rows = p.rows >= kMinDigitRows && p.rows <= kMaxDigitRows;
  const DigitGemms* const gemms =
      some_rows && may_use_digits(p.w) ? digit_gemms(runtime::isa(Dtype::kBf16)) : nullptr;
  if (!gemms) return nullptr;
  const auto fits = [&](const DigitGemm& gemm) {
    return p.rows * p.w.k * gemm.digits <= kMaxDigitBytes;
  };
  const DigitGemm &few = gemms->of[int(dtype)], &more = gemms->of[int(Dtype::kFp32)];
  if (!fits(few)) return nullptr;
  const bool may_use_more = p.rows <= kMaxRowsOfMoreDigits && fits(more);
  const int digits = gemms->fewest(p, dtype, may_use_more ? more.digits : few.digits);
  if (digits == 0) return nullptr;
  return digits <= few.digits ? &few : &more;
}

// Returns the number of digits of x that a gemv should multiply, or 0 if it should convert W. In
// fp32, kMaxGemvDigits almost never suffice.
int gemv_digits(const Product& p, Dtype dtype, const DigitGemv* gemv) {
  const bool possible = gemv && dtype == Dtype::kBf16 && may_use_digits(p.w);
  return possible ? gemv->fewest(p, dtype, kMaxGemvDigits) : 0;
}

void multiply_digits(const Product& p, const DigitGemm& gemm, int threads) {
  const int64_t panels = ceil_div(p.rows * gemm.digits, int64_t(runtime::kAmxRows));
  const int64_t factors = ceil_div(p.rows, int64_t(kLanes)) * kLanes;
  static thread_local runtime::LargeScratch scratch;
  float* const memory = scratch.get(factors + panels * p.w.blocks() * kPanelBlockBytes / 4);
  const Digits x{memory, reinterpret_cast<char*>(memory + factors), panels};
  pack_parts(p.rows, panels, threads,
             [&](int64_t from, int64_t until) { gemm.pack(p, x, from, until); });
  const int64_t blocks = ceil_div(p.w.n, kDigitBlock);
  const int64_t share = ceil_div(blocks, int64_t(threads) * 8);
  in_pieces(threads, blocks, std::max<int64_t>(1, std::min(share, kPieceBlocks)),
            [&](int64_t from, int64_t to) { gemm.run(p, x, from, to); });
}

// Returns the kernels of the tile unit in use for W in panels, or null if there is none. Such a
// unit is fastest for products in fp32, too.
const TilePanels* panels_on_tiles() { return tile_panels(runtime::isa(Dtype::kBf16)); }

// Returns the kernels in use for digits and W in panels, or null if there are none.
const PanelDigits* panels_on_vectors() { return panel_digits(runtime::isa(Dtype::kBf16)); }

// Throws std::invalid_argument if W is in panels that the instruction set in use does not multiply.
void check_panels(const Weight& w, const Kernels& here) {
  const bool possible =
      w.panel_rows == 0 || (w.panel_rows == kPanelRows && here.panels.run) ||
      (w.panel_rows == kTilePanelRows && (panels_on_tiles() || panels_on_vectors()));
  if (possible) return;
  throw std::invalid_argument(
      "weights in panels of " + std::to_string(w.panel_rows) + " rows, which '" +
      name_of(runtime::isa(Dtype::kBf16)) + "' cannot multiply; only " +
      (w.panel_rows == kPanelRows ? "avx2" : "amx and avx512_bf16") + " can");
}

// Returns the number of rows of x in a tile: the fewest for which there are kernels.
int tile_rows(const TilePanels& kernels, int64_t rows) {
  for (const int each : kernels.tile_rows)
    if (rows <= each) return each;
  return runtime::kAmxRows;
}

// Multiplies a slice of the depth with some rows of x.
void multiply_slice(const TilePanels& kernels, const Product& p, const PanelSlice& slice,
                    int threads) {
  static thread_local runtime::LargeScratch packed;
  auto* const x = reinterpret_cast<char*>(packed.get(slice.tiles() * slice.tile_bytes() / 4));
  pack_parts(slice.rows, slice.tiles(), threads,
             [&](int64_t from, int64_t until) { kernels.pack(p, slice, x, from, until); });
  // Rounded weights are multiplied in pairs of panels.
  const int64_t each = panels_of_piece(p.w, threads, 2);
  in_pieces(threads, p.w.n / kTilePanelRows, each, [&](int64_t from, int64_t to) {
    static thread_local runtime::Scratch scratch;
    kernels.run(p, slice, x, from, to,
                reinterpret_cast<char*>(scratch.get(slice.scratch_bytes() / 4)));
    if (slice.streaming) _mm_sfence();
  });
}

// Multiplies W in panels on a tile unit. x is divided evenly into parts, and their depth into
// slices that fit into half of L2.
void multiply_panels(const TilePanels& kernels, const Product& p, Dtype dtype, int threads) {
  const int64_t parts = ceil_div(p.rows, kMaxPartRows[int(dtype)]), each = ceil_div(p.rows, parts),
                groups = p.w.blocks() * (kBlock / kMinGroup), size = p.rows * p.w.n * 4;
  const bool writes_lines = reinterpret_cast<uintptr_t>(p.y) % 64 == 0 && p.y_stride % kLanes == 0;
  for (int64_t row = 0; row < p.rows; row += each) {
    PanelSlice slice{dtype, row,  std::min(each, p.rows - row), 0, groups, runtime::kAmxRows,
                     false, false};
    slice.rounded = dtype == Dtype::kBf16 && p.rows >= kMinRoundedRows;
    if (!slice.rounded) {
      const int64_t tiles = ceil_div(slice.rows, int64_t(runtime::kAmxRows));
      slice.tile_rows = tile_rows(kernels, ceil_div(slice.rows, tiles));
    }
    const int64_t bytes = slice.tiles() * slice.tile_bytes(),
                  slices = slice.tiles() == 1 ? 1 : ceil_div(bytes, runtime::machine().l2 / 2),
                  depth = ceil_div(ceil_div(groups, slices), kSliceGroups) * kSliceGroups;
    for (; slice.from < groups; slice.from += depth) {
      slice.count = std::min(depth, groups - slice.from);
      slice.streaming = slice.count == groups && writes_lines && size > runtime::machine().l2;
      multiply_slice(kernels, p, slice, threads);
    }
  }
}

// Multiplies W in panels with digits of x by vectors.
void multiply_digits_of_panels(const PanelDigits& kernels, const Product& p, int digits,
                               int threads) {
  static thread_local runtime::LargeScratch packed;
  auto* const x = reinterpret_cast<char*>(packed.get(p.rows * kernels.row_bytes(p.w, digits) / 4));
  kernels.pack[digits - kMinDigits](p, x);
  in_pieces(threads, p.w.n / kTilePanelRows, panels_of_piece(p.w, threads),
            [&](int64_t from, int64_t to) { kernels.run[digits - kMinDigits](p, x, from, to); });
}

// Multiplies W in panels of kTilePanelRows rows. Returns false if its rows should be widened.
bool multiply_tile_panels(const Product& p, Dtype dtype, int threads) {
  if (const TilePanels* const kernels = panels_on_tiles()) {
    multiply_panels(*kernels, p, dtype, threads);
    return true;
  }
  if (p.rows > kMaxPanelDigitRows) return false;
  const int digits = panels_on_vectors()->digits(p, dtype);
  if (digits == 0 || (digits == kMaxDigits && p.rows > kMaxRowsOfAllDigits)) return false;
  multiply_digits_of_panels(*panels_on_vectors(), p, digits, threads);
  return true;
}

}  // namespace

int64_t preferred_panel_rows() {
  if (panels_on_tiles() || panels_on_vectors()) return kTilePanelRows;
  return kernels(runtime::vector_isa(Dtype::kFp32)).panels.run ? kPanelRows : 0;
}

void multiply(const Product& p, Dtype dtype, int threads) {
  if (p.rows <= 0 || p.w.n <= 0) return;
  const Kernels& here = kernels(runtime::vector_isa(Dtype::kFp32));
  check_panels(p.w, here);
  const bool tile_panels = p.w.panel_rows == kTilePanelRows;
  if (tile_panels && multiply_tile_panels(p, dtype, threads)) return;
  if (const DigitGemm* const digits = digits_for(p, dtype)) {
    multiply_digits(p, *digits, threads);
    return;
  }
  if (const gemm::AmxGemm* const tiles = tiles_for(p, dtype)) {
    gemm::multiply_by_tiles(*tiles, with_matrix(p, dtype, &p.w, 0, p.w.n), threads);
    return;
  }
  if (p.rows <= here.max_gemv_rows && !tile_panels) {
    const DigitGemv* const of_digits = digit_gemv(runtime::vector_isa(Dtype::kFp32));
    const int digits = gemv_digits(p, dtype, of_digits);
    const Gemv& gemv = digits ? of_digits->of[digits - kMinDigits] : gemv_for(p, dtype, here);
    const int64_t together = p.w.panel_rows ? kPanelRows : gemm::kStreams;
    const int64_t rows = p.w.n / together, row_bytes = together * p.w.row_bytes();
    const int64_t share = ceil_div(rows, int64_t(threads) * 8);
    const int64_t least = p.w.panel_rows ? kPanelsAtOnce : 1;
    const int64_t each =
        ceil_div(std::max<int64_t>(1, std::min(share, kPieceBytes / row_bytes)), least) * least;
    static thread_local runtime::LargeScratch scratch;
    float* const x = scratch.get(digits ? digit_gemv_scratch(p, digits) : gemv_scratch(p));
    gemv.pack(p, x);
    in_pieces(threads, rows, each, [&](int64_t from, int64_t to) { gemv.run(p, x, from, to); });
    return;
  }
  const gemm::Kernels& products = gemm::kernels(runtime::vector_isa(dtype));
  const gemm::AmxGemm* const amx = gemm::amx_gemm_for(dtype);
  const auto widen = tile_panels      ? panels_on_vectors()->widen[int(dtype)]
                     : p.w.panel_rows ? here.widen_panels[int(dtype)]
                                      : here.widen[int(dtype)];
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

// Gemm of rows of x with int8 weights on a tile unit. Weights are converted to bf16 tiles
// in scratch, which stay in L1 while all panels of x are multiplied with them. x is rounded to
// bf16, or split into limbs if bf16 represents the integers of W exactly. Included after the lines
// of an instruction set (lines_amx.h or lines_twin.h).
#pragma once

#include <utility>

#include "gemm/gemm_amx.h"
#include "quantized/quantized.h"

namespace vlora::quantized::VLORA_ISA {

using namespace vlora::gemm::VLORA_ISA;
using gemm::Piece;
using gemm::Slice;
using runtime::kLimbs;

// Maximum number of tiles along the depth of a chunk of W, in whole blocks. There are two chunks in
// scratch: while one is multiplied, the other is converted. They take 32 KiB of L1. In shorter
// chunks, more products would wait for lines that were stored just before.
constexpr int64_t kTilesInBlock = kBlock / kTileDepth, kMaxChunkTiles = 8;
static_assert(2 * kMaxChunkTiles * 2 * kTileBytes <= gemm::kAmxScratch * 4);

// Converts rows of W to tiles in scratch, a few rows at a time between the products. Meanwhile the
// same depth of the next piece is prefetched. A slice begins with a whole block.
static_assert(gemm::kSliceStep % kBlock == 0);
template <class Lines>
class ConvertRows {
 public:
  ConvertRows(const gemm::Product& p, const Slice& slice, const Piece& piece)
      : w_(*static_cast<const Weight*>(p.w)),
        rows_(p, piece.from),
        ahead_(piece.next < 0 ? 0 : piece.next - piece.from),
        block_(slice.from / kBlock) {}

  // Begins the next `tiles` tiles of depth. Blocks are converted as a whole.
  void begin(int64_t tiles, char* to) {
    block_ += blocks_, blocks_ = ceil_div(tiles, kTilesInBlock);
    to_ = to, next_ = tiles > 0 ? 0 : kAmxBlockRows;
  }
  VLORA_INLINE void advance(int64_t rows) {
    for (; rows > 0 && next_ < kAmxBlockRows; --rows, ++next_) {
      const int64_t half = next_ / kAmxRows, row = next_ % kAmxRows;
      if (row >= rows_.rows[half]) continue;
      Lines::write(w_, rows_.row[half] + row, block_, blocks_, ahead_,
                   to_ + half * kTileBytes + row * kLine, 2 * kTileBytes);
    }
  }
  void finish() { advance(kAmxBlockRows); }

 private:
  const Weight w_;
  const TileRows rows_;
  const int64_t ahead_;
  int64_t block_, blocks_ = 0, next_ = 0;
  char* to_ = nullptr;
};

// Multiplies the sums of a pair of panels by the scales of a piece's rows.
inline void scale_sums(const gemm::Product& p, const Piece& piece, float* sums) {
  const auto& w = *static_cast<const Weight*>(p.w);
  const TileRows rows(p, piece.from);
  for (int half = 0; half < 2; ++half)
    for (int64_t row = 0; row < rows.rows[half]; ++row) {
      float* const line = sums + (half * kAmxRows + row) * kSumStride;
      const R scale = R::all(w.scales[rows.row[half] + row]);
      for (int i = 0; i < kSumStride; i += R::kWidth) (R::load(line + i) * scale).store(line + i);
    }
}

// Multiplies two tiles of rows of W with the limbs of one or two panels over `tiles` tiles of
// depth. between() runs after each product of a limb.
template <bool kSecond, class Work>
void multiply_limbs_of_x(TileSource w, const char* x, ptrdiff_t panel_bytes, int64_t tiles,
                         float* sums, bool first, const Work& between) {
  using Block = TileBlock<2, kSecond ? 2 : 1>;
  if (first)
    Block::zero();
  else
    Block::template load<true>(sums, kSumStride);
  for (; tiles > 0; --tiles, w.at += w.depth, x += kLimbs * kTileBytes) {
    Block::load_left(w.at, w.line, w.second);
    for (int limb = kLimbs - 1; limb >= 0; --limb) {
      Block::template load_right<true>(x + limb * kTileBytes, kLine, panel_bytes);
      Block::multiply();
      between();
    }
  }
  Block::store(sums, kSumStride);
}

template <int kCount, bool kSecond, class Work>
void multiply_converted(const TileSource& w, const char* x, ptrdiff_t panel_bytes, int64_t tiles,
                        float* sums, bool first, const Work& between) {
  if constexpr (kCount == 1)
    multiply_pair<kSecond, false>(w, x, panel_bytes, tiles, sums, first, nullptr, between);
  else
    multiply_limbs_of_x<kSecond>(w, x, panel_bytes, tiles, sums, first, between);
}

// Multiplies two tiles of rows of W with all panels of a piece. kCount: tiles of x per tile of
// depth, 1 or kLimbs. scratch: two chunks of W, then the sums.
template <class Lines, int kCount = 1>
void gemm_converted(const gemm::Product& p, const Slice& slice, const char* panels,
                    const Piece& piece, char* scratch) {
  const int64_t depth = ceil_div(slice.count, kTileDepth),
                panel_bytes = depth * kCount * kTileBytes;
  const int64_t pairs = ceil_div(piece.panels, 2), chunks = ceil_div(depth, kMaxChunkTiles),
                chunk = ceil_div(ceil_div(depth, chunks), kTilesInBlock) * kTilesInBlock;
  auto* const sums = reinterpret_cast<float*>(scratch + gemm::kAmxScratch * 4);
  const Store how = store_of(p, slice, piece);
  configure(kAmxRows, kAmxRows, kAmxRows);
  char* converted = scratch;
  char* other = scratch + chunk * 2 * kTileBytes;
  ConvertRows<Lines> convert(p, slice, piece);
  convert.begin(depth < chunk ? depth : chunk, converted);
  convert.finish();
  Epilogue epilogue;
  for (int64_t k = 0; k < depth; k += chunk) {
    const int64_t tiles = depth - k < chunk ? depth - k : chunk, after = depth - k - tiles;
    const bool last = after == 0;
    const int64_t quarters = last ? ceil_div(Epilogue::kQuarters, tiles * kCount) : 0;
    convert.begin(after < chunk ? after : chunk, other);
    const int64_t rows = ceil_div(kAmxBlockRows, tiles * kCount * pairs);
    const TileSource w{converted, kLine, 2 * kTileBytes, kTileBytes};
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const char* const x =
          panels + (piece.panel + 2 * pair) * panel_bytes + k * kCount * kTileBytes;
      float* const to = sums + pair * kPairFloats;
      const auto between = [&] {
        convert.advance(rows);
        epilogue.advance(quarters);
      };
      if (2 * pair + 1 < piece.panels) {
        multiply_converted<kCount, true>(w, x, panel_bytes, tiles, to, k == 0, between);
      } else {
        multiply_converted<kCount, false>(w, x, panel_bytes, tiles, to, k == 0, between);
      }
      if (last) {
        epilogue.finish();
        if constexpr (Lines::kIntegers) scale_sums(p, piece, to);
        epilogue = Epilogue(p, piece, 2 * pair, to, how);
      }
    }
    convert.finish();
    std::swap(converted, other);
  }
  epilogue.finish();
}

// Packs one tile, with the values rounded to bf16 and interleaved.
inline void pack_interleaved_columns(const float* x, ptrdiff_t stride, int rows, int count,
                                     char* to) {
  pack_columns<1>(x, stride, rows, count, to,
                  [](const Fp32Line& values, Bf16Line* lines) __attribute__((always_inline)) {
                    lines[0] = values.rounded().interleaved();
                  });
}

// Packs one tile for each limb, with the values interleaved.
inline void pack_interleaved_limbs(const float* x, ptrdiff_t stride, int rows, int count,
                                   char* to) {
  pack_columns<kLimbs>(x, stride, rows, count, to,
                       [](const Fp32Line& values, Bf16Line* lines) __attribute__((always_inline)) {
                         const Limbs limbs = split_truncated(values);
                         for (int i = 0; i < kLimbs; ++i) lines[i] = limbs.line[i].interleaved();
                       });
}

// Calls use(lines) with the lines of a type of weights.
template <class Use>
VLORA_INLINE void with_lines(const Weight& w, const Use& use) {
  if (w.has_row_scales()) {
    use(Int8Lines<false>{});
  } else {
    use(Int8Lines<true>{});
  }
}

inline void pack_bf16_rows(const gemm::Product& p, const Slice& slice, char* to, int64_t from,
                           int64_t until) {
  with_lines(*static_cast<const Weight*>(p.w), [&](auto lines) {
    pack_panels_of_tiles<1>(
        p, slice, to, from, until,
        decltype(lines)::kInterleaved ? pack_interleaved_columns : pack_rounded_columns);
  });
}

inline void pack_fp32_rows(const gemm::Product& p, const Slice& slice, char* to, int64_t from,
                           int64_t until) {
  pack_panels_of_tiles<kLimbs>(p, slice, to, from, until, pack_interleaved_limbs);
}

inline void multiply_bf16_rows(const gemm::Product& p, const Slice& slice, const char* panels,
                               const Piece& piece, char* scratch) {
  with_lines(*static_cast<const Weight*>(p.w), [&](auto lines) {
    gemm_converted<decltype(lines)>(p, slice, panels, piece, scratch);
  });
}

inline void multiply_fp32_rows(const gemm::Product& p, const Slice& slice, const char* panels,
                               const Piece& piece, char* scratch) {
  gemm_converted<Int8Lines<false>, kLimbs>(p, slice, panels, piece, scratch);
}

}  // namespace vlora::quantized::VLORA_ISA

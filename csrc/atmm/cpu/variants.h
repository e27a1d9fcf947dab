// The choice of the kernel variant for a block of rows, as one pure function.
#pragma once

#include <cstdint>

namespace vlora::atmm {

// Maximum number of rows that a tile reads in place. Each row's address takes a general register.
constexpr int64_t kMaxDirectRows = 8;

// Minimum number of rows for which AMX tiles are faster than vectors. Fewer rows are one register
// tile, which reads an adapter as one prefetched stream at the rate of memory. Measured with rank
// 64, adapters in memory and 2 threads, vectors against AMX tiles: 4 rows 95 and 104 µs, 6 rows 95
// and 103 µs, 8 rows (two register tiles) 153 and 100 µs.
constexpr int64_t kMinTileUnitRows = 7;

// The place from which the first product reads its rows.
enum class RowSource {
  kInPlace,         // the caller's memory
  kCopied,          // scratch, to which they are copied once
  kCopiedByPieces,  // scratch, kScratchStride apart, to which the depth is copied piece by piece
};

// The way in which a product reads its panels.
enum class Variant {
  kPrefetching,  // once, with software prefetch and several chains of sums
  kDirect,       // once for each register tile of rows, which are any stride apart
  kPacked,       // the same, for rows a constant stride apart
  kWidened,      // kPacked, with bf16 panels converted to fp32 once for all register tiles of rows
  kTileUnit,     // by AMX tiles or their plain C++ equivalent
};

// The properties on which the choice depends.
struct BlockTraits {
  int64_t rows;
  bool bf16;
  bool pairs;        // the instruction set multiplies pairs of bf16
  bool tiles;        // the instruction set multiplies tiles of bf16 pairs
  bool readable;     // rows can be read in place: whole words, and no conversion
  bool one_panel;    // A has only one panel
  bool fixed_order;  // the choice must not depend on rows, so that a row's sums never do
};

struct Variants {
  RowSource rows;
  Variant shrink, expand;
};

constexpr Variants variants_of(const BlockTraits& t) {
  const bool few = t.rows <= kMaxDirectRows, widens = t.bf16 && !t.pairs;
  const RowSource rows = t.readable ? RowSource::kInPlace
                         : few      ? RowSource::kCopied
                                    : RowSource::kCopiedByPieces;
  if (t.bf16 && t.tiles && (t.fixed_order || t.rows >= kMinTileUnitRows))
    return {rows, Variant::kTileUnit, Variant::kTileUnit};
  const Variant packed = widens ? Variant::kWidened : Variant::kPacked;
  // A single panel has too few sums to fill the pipeline, for any number of rows.
  const Variant shrink = rows == RowSource::kCopiedByPieces       ? packed
                         : !t.fixed_order && (few || t.one_panel) ? Variant::kPrefetching
                                                                  : Variant::kDirect;
  const Variant expand = few && !t.fixed_order ? Variant::kPrefetching : packed;
  return {rows, shrink, expand};
}

}  // namespace vlora::atmm

// Which way a block of rows goes: one pure function.
#pragma once

#include <cstdint>

namespace vlora::atmm {

constexpr int64_t kFewRows = 8;
// Rows that are read where they lie: a tile of so many has a general register to address each.
constexpr int64_t kTileUnitRows = 7;
// From so many rows on a unit that multiplies tiles beats vectors. Fewer are one register tile, which passes
// an adapter in one stream, fetched ahead, at the memory's rate (rank 64 out of memory, 2 threads: 4 rows
// 95 us against 104, 6 rows 95 against 103; 8 rows, two register tiles, 153 against 100).

// Where the first product finds its rows: where the caller has them; copied once, whole; copied piece by
// piece of the depth, a constant stride apart.
enum class RowsIn { kPlace, kCopy, kPieces };

// How a product passes its panels.
enum class Path {
  kStream,   // once, fetched ahead, several chains of sums
  kDirect,   // once for each tile of rows, which lie any stride apart
  kPacked,   // the same, rows a constant stride apart
  kWidened,  // kPacked, panels of bf16 made fp32 once for all tiles of rows
  kTiles,    // by a unit that multiplies tiles
};

struct Facts {
  int64_t rows;
  bool bf16;
  bool pairs;      // the instruction set multiplies pairs of bf16
  bool tiles;      // and has a unit that multiplies tiles of them
  bool readable;   // rows can be read where they lie: whole units, and no conversion
  bool packing;    // the configuration copies rows
  bool one_panel;  // A has no more
  bool one_order;  // a row's sums are the same in any batch: nothing may depend on the number of rows
};

struct Paths {
  RowsIn rows;
  Path shrink, expand;
};

constexpr Paths paths_of(const Facts& f) {
  const bool few = f.rows <= kFewRows, widening = f.bf16 && !f.pairs;
  const RowsIn rows = f.packing    ? RowsIn::kPieces
                      : f.readable ? RowsIn::kPlace
                      : few        ? RowsIn::kCopy
                                   : RowsIn::kPieces;
  if (f.bf16 && f.tiles && (f.one_order || f.rows >= kTileUnitRows))
    return {rows, Path::kTiles, Path::kTiles};
  // One panel leaves too few sums to fill the pipeline, however many rows there are.
  const Path shrink = rows == RowsIn::kPieces                     ? widening ? Path::kWidened : Path::kPacked
                      : !f.one_order && (few || f.one_panel) ? Path::kStream
                                                             : Path::kDirect;
  const Path expand = few && !f.one_order ? Path::kStream : widening ? Path::kWidened : Path::kPacked;
  return {rows, shrink, expand};
}

}  // namespace vlora::atmm

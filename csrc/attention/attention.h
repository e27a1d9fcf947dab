// Attention over paged keys and values. No torch, no Python, no ownership.
//
// A page holds `block` tokens. For each layer it contains the keys of every head and then the
// values of every head, in panels of kLanes tokens. The last panel of a page may be partly used. In
// fp32 a panel of keys is [dim][kLanes], so that the scores of its tokens fill a vector, and a
// panel of values is [kLanes][padded dim]. In bf16, neighbouring values along the sum of a product
// form pairs: keys are [dim / 2][kLanes][2], values [kLanes / 2][padded dim][2]. A shift and a mask
// widen a pair, and instructions for bf16 pairs take it as it is. Padding is zero.
//
// Invariant: values in pages are finite. If an element of a token's key or value is not finite, the
// token's value is stored as zeros, and the first element of its key as NaN. A tile multiplies a
// value by the weights of all its rows, even by the zero weights of rows before the token, and zero
// times NaN would be NaN. Scores of tokens that a row does not see are discarded, so the NaN
// reaches only the rows that see the token.
#pragma once

#include <vector>

#include "runtime/dispatch.h"
#include "runtime/types.h"

namespace vlora::attention {

// The layout of the pages. Sizes are in elements of the storage type.
struct Layout {
  Dtype dtype;
  int64_t block;     // tokens of a page
  int64_t kv_heads;  // heads of keys and values
  int64_t dim;       // of a head
  int64_t page;      // elements between pages
  int64_t pages;     // number of pages

  int64_t padded() const { return ceil_div(dim, kLanes) * kLanes; }
  int64_t panels() const { return ceil_div(block, kLanes); }  // of a page
  int64_t panel() const { return padded() * kLanes; }
  int64_t head() const { return panels() * panel(); }
  int64_t values() const {
    return kv_heads * head();
  }  // between the keys and the values of a layer
};

// Rows row … row + length - 1 of the step are positions start … of one sequence. The pages of the
// sequence begin at pages[first_page] of the plan.
struct Chunk {
  int64_t row, length, start, first_page;
};

// A query is one row of the step for one head of queries. kMaxQueries is the maximum number of
// queries that share a pass over keys and values, unless a group of heads is larger. With tiles the
// maximum is kMaxAmxQueries: keys and values are read half as often and copied only once.
constexpr int64_t kMaxQueries = 64;
constexpr int64_t kMaxAmxQueries = 128;
// Number of panels in a block, whose scores are kept together. The keys and values of its 128
// tokens stay in L2 for one head.
constexpr int64_t kBlockPanels = 8;
// Number of queries in a tile whose sums fill 16 or 32 registers. Reduced builds have fewer sizes
// of tile, but at least one for each number of panels that a tile takes (`at_once`).
#ifdef VLORA_REDUCED_TILES
constexpr int kTileQueries = 4, kTallTileQueries = 7;
#else
constexpr int kTileQueries = 6, kTallTileQueries = 12;
#endif
// Maximum width of a head; maximum number of tiles of queries in a piece, and of heads of keys and
// values.
constexpr int64_t kMaxDim = 512, kMaxTiles = 64, kMaxHeads = kMaxQueries;

// A unit of work: some rows of a chunk, some heads of keys and values with the heads of queries
// that share them, and a part of their keys. A piece with few rows has many heads, because heads
// are contiguous in a page.
struct Piece {
  int32_t chunk, kv_head, kv_heads;
  int64_t row, rows;      // of the chunk
  int64_t panel, panels;  // of the sequence
  int32_t partial;  // index among the partial results, or -1 if the piece has all keys of its rows
  int32_t first_partial;  // index of the first partial result of the same rows
  int32_t parts, group;   // number of pieces with the same rows, and the index of that group
  double cost;            // of all parts; the unit is reading one panel of a head

  bool last() const { return parts == 1 || partial - first_partial == parts - 1; }
};

// Rows of a chunk whose keys and values go to one panel of each head.
struct Written {
  int32_t chunk;
  int64_t row, rows;
};

// The work of a step. It is made once, and every layer uses it.
class Plan {
 public:
  // Throws std::invalid_argument for chunks that do not fit the pages.
  // fixed_order: let the bits of a row depend on its position and its sequence only, and not on the
  // chunks, the other rows or the threads. It is slower for long contexts and with tiles.
  Plan(const Layout& layout, int64_t heads, std::vector<Chunk> chunks, std::vector<int32_t> pages,
       int threads, bool fixed_order = false);

  int64_t rows() const { return rows_; }
  int64_t partials() const { return partials_; }
  int64_t groups() const { return groups_; }
  int64_t queries() const { return queries_; }  // maximum of one piece
  const std::vector<Piece>& pieces() const { return pieces_; }
  // The rows that are written before attention begins. For a chunk of one row, its last piece
  // writes the row.
  const std::vector<Written>& written() const { return written_; }

  const Layout layout;
  const int64_t heads;  // of queries
  const std::vector<Chunk> chunks;
  const std::vector<int32_t> pages;
  const bool fixed_order;

 private:
  void add_pieces(size_t chunk, int64_t group, int threads);
  void add_written(size_t chunk);
  void split(double max_cost, int threads);
  void sort();

  int64_t rows_ = 0, partials_ = 0, groups_ = 0, queries_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Written> written_;
};

// One layer of a step. Keys are rotated when they are written to the pages. Queries are rotated
// when they are read from q; q is not changed.
struct Problem {
  const Plan* plan;
  char* cache;     // this layer in page 0
  const float* q;  // [rows, heads + 2 kv_heads, dim]: queries, keys, values
  ptrdiff_t q_stride;
  float* y;  // [rows, heads * dim]
  ptrdiff_t y_stride;
  const float* cosines;  // [rows, dim / 2], as are the sines
  const float* sines;
  float scale;
};

struct Kernels {
  // partial: null, or the destination of an unfinished result: the maxima of all queries, their
  // sums, their values.
  void (*attend[kDtypes])(const Problem&, const Piece&, float* scratch, float* partial);
  void (*write[kDtypes])(const Problem&, const Written&);
  // Combines the partial results of a group of pieces; `piece` is any of them.
  void (*combine)(const Problem&, const Piece&, const float* partials);
  int64_t queries;  // maximum number of queries of one head in a piece
};
const Kernels& kernels(runtime::Isa isa);
// Returns the kernels for a plan: those of a tile unit if it is in use, else of vectors. Tiles
// divide keys into blocks by the last row of a piece, so they have no fixed order.
const Kernels& kernels_of(const Plan& plan);

// Returns the number of floats of scratch that `attend` needs.
int64_t scratch_floats(const Plan& plan);
// Returns the number of floats of a partial result: maxima, sums and values of `plan.queries()`
// queries.
inline int64_t partial_floats(const Plan& plan) {
  return plan.queries() * (2 + plan.layout.padded());
}

// Writes keys and values of all rows to the pages. Then computes attention of every row over its
// sequence up to the row itself.
void attend(const Kernels& kernels, const Problem& problem, int threads);

}  // namespace vlora::attention

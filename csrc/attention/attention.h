// Attention over paged keys and values. No torch, no Python, no ownership.
//
// Pages: a page of `block` tokens holds, for each layer, first keys, then values of each head, in panels
// of kLanes tokens (the last one of a page may be partly used). In fp32 a panel of keys is
// [dim][kLanes], so that the scores of its tokens fill a vector, and a panel of values is
// [kLanes][padded dim]. In bf16 neighbours along what a product adds up are pairs, which a shift and a
// mask widen, and which products of pairs take: keys [dim / 2][kLanes][2], values
// [kLanes / 2][padded dim][2]. What lies beyond the dim is zero.
#pragma once

#include <vector>

#include "runtime/dispatch.h"
#include "runtime/types.h"

namespace vlora::attention {

// The pages' layout; sizes in elements of the storage type.
struct Layout {
  Dtype dtype;
  int64_t block;     // tokens of a page
  int64_t kv_heads;
  int64_t dim;       // of a head
  int64_t page;      // from page to page: for each layer keys of all heads, then values of all
  int64_t pages;     // that there are

  int64_t padded() const { return ceil_div(dim, kLanes) * kLanes; }
  int64_t panels() const { return ceil_div(block, kLanes); }  // of a page
  int64_t panel() const { return padded() * kLanes; }
  int64_t head() const { return panels() * panel(); }
  int64_t values() const { return kv_heads * head(); }  // from a layer's keys to its values
};

// Rows row … row + length - 1 of the step are positions start … of one sequence, whose pages are
// pages[first_page …] of the plan.
struct Chunk {
  int64_t row, length, start, first_page;
};

constexpr int64_t kItems = 64;
// Most (row, head) pairs that share one pass over keys and values, unless a group of heads is larger.
constexpr int64_t kTiledItems = 128;
// The same where tiles are multiplied: keys and values come half as often, and are copied once.
constexpr int64_t kBlockPanels = 8;
// Panels whose scores are held at a time: 128 tokens of a head's keys and values stay in L2 meanwhile.

constexpr int kTileItems = 6;
// (row, head) pairs whose sums over a panel fill the registers.
constexpr int64_t kMostDim = 512, kMostTiles = 64, kMostHeads = kItems;

// Some rows of a chunk, some heads of keys and values with those that share them, and a part of their
// keys. With few rows the heads are many, since they lie side by side in a page.
struct Piece {
  int32_t chunk, kv_head, kv_heads;
  int64_t row, rows;      // of the chunk
  int64_t panel, panels;  // of the sequence
  int32_t shared;         // its place among the partial results, or -1 where there is one part only
  int32_t first;          // the place of its rows' first part
  int32_t parts, group;   // parts of the same rows, and the number of that group
  double cost;            // of all parts, in reads of a head's panel

  bool last() const { return parts == 1 || shared - first == parts - 1; }
};

// Rows of a chunk whose keys and values go into one panel of each head.
struct Written {
  int32_t chunk;
  int64_t row, rows;
};

// What a step attends to: made once, used by every layer.
class Plan {
 public:
  // Throws std::invalid_argument for chunks that do not fit the pages.
  Plan(const Layout& layout, int64_t heads, std::vector<Chunk> chunks, std::vector<int32_t> pages,
       int threads);

  int64_t rows() const { return rows_; }
  int64_t partials() const { return partials_; }
  int64_t groups() const { return groups_; }
  int64_t items() const { return items_; }  // most of one piece
  const std::vector<Piece>& pieces() const { return pieces_; }
  // What is written before anything is attended to; a chunk of one row is written by its last piece.
  const std::vector<Written>& written() const { return written_; }

  const Layout layout;
  const int64_t heads;
  const std::vector<Chunk> chunks;
  const std::vector<int32_t> pages;

 private:
  void share(double most, int threads);

  int64_t rows_ = 0, partials_ = 0, groups_ = 0, items_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Written> written_;
};

// One layer of a step. Keys are rotated on their way into the pages, queries on their way out of q,
// which stays as it is.
struct Problem {
  const Plan* plan;
  char* cache;     // of this layer in page 0
  const float* q;  // [rows, heads + 2 kv_heads, dim]: queries, keys, values
  ptrdiff_t q_stride;
  float* y;  // [rows, heads * dim]
  ptrdiff_t y_stride;
  const float* cosines;  // [rows, dim / 2]
  const float* sines;
  float scale;
};

struct Kernels {
  // partial: null, or where an unfinished result goes: per item its maximum, its sum, then its values.
  void (*attend[kDtypes])(const Problem&, const Piece&, float* scratch, float* partial);
  void (*write[kDtypes])(const Problem&, const Written&);
  // The parts of rows whose keys were shared out, as one. piece: any of them.
  void (*combine)(const Problem&, const Piece&, const float* partials);
  int64_t items;  // most of one head's that a piece should have
};
const Kernels& kernels(runtime::Isa isa);
// Those in use for pages of a type: of a unit that multiplies tiles, or of vectors.
const Kernels& kernels_of(Dtype dtype);

// fp32 values that `attend` needs.
int64_t scratch_floats(const Plan& plan);
// Of one partial result: maxima, sums, values of as many items as a piece may have.
inline int64_t partial_floats(const Plan& plan) {
  return plan.items() * (2 + plan.layout.padded());
}

// Adds keys and values of all rows to the pages, then lets every row see its sequence up to itself.
void attend(const Kernels& kernels, const Problem& problem, int threads);

}  // namespace vlora::attention

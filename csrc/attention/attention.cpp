#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>

#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::attention {
namespace {

// Number of pieces per thread: so many that all threads finish at nearly the same time.
constexpr int64_t kPiecesPerThread = 8;
// Minimum bytes of keys and values in a part. A smaller part is not worth a partial result.
constexpr int64_t kMinPartBytes = 262144;
// Number of queries whose products with a panel take as long as reading the panel.
constexpr int64_t kQueriesPerRead = 12;

// Returns the number of panels that hold positions 0 … position.
int64_t panels_to(const Layout& layout, int64_t position) {
  return position / layout.block * layout.panels() + position % layout.block / kLanes + 1;
}

}  // namespace

Plan::Plan(const Layout& l, int64_t h, std::vector<Chunk> c, std::vector<int32_t> p, int threads,
           bool fixed)
    : layout(l), heads(h), chunks(std::move(c)), pages(std::move(p)), fixed_order(fixed) {
  if (layout.kv_heads < 1 || heads < 1 || heads % layout.kv_heads)
    throw std::invalid_argument(std::to_string(heads) + " heads of queries do not divide into " +
                                std::to_string(layout.kv_heads) + " heads of keys and values");
  const int64_t group = heads / layout.kv_heads;
  if (layout.dim < 2 || layout.dim > kMaxDim || group > kMaxTiles * kTileQueries)
    throw std::invalid_argument("unsupported heads: dim " + std::to_string(layout.dim) + " (2 to " +
                                std::to_string(kMaxDim) + "), " + std::to_string(group) +
                                " heads of queries to one of keys and values (at most " +
                                std::to_string(kMaxTiles * kTileQueries) + ")");
  queries_ = std::max(kMaxQueries, group);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    const int64_t used = ceil_div(chunk.start + chunk.length, layout.block);
    if (chunk.row != rows_ || chunk.length < 1 || chunk.start < 0 || chunk.first_page < 0 ||
        chunk.first_page + used > int64_t(pages.size()))
      throw std::invalid_argument("chunk (row " + std::to_string(chunk.row) + ", length " +
                                  std::to_string(chunk.length) + ", start " +
                                  std::to_string(chunk.start) + ") does not fit the plan");
    for (int64_t page = chunk.first_page; page < chunk.first_page + used; ++page)
      if (pages[size_t(page)] < 0 || pages[size_t(page)] >= layout.pages)
        throw std::invalid_argument("page " + std::to_string(pages[size_t(page)]) +
                                    " is not among " + std::to_string(layout.pages) + " pages");
    rows_ += chunk.length;
    add_pieces(i, group, threads);
    if (chunk.length > 1) add_written(i);
  }
  if (threads > 1 && !fixed_order) {
    double work = 0;
    for (const Piece& piece : pieces_) work += piece.cost;
    split(work / double(threads * kPiecesPerThread), threads);
  }
  sort();
}

void Plan::add_pieces(size_t index, int64_t group, int threads) {
  const Chunk& chunk = chunks[index];
  // Pieces get as many rows as allowed, if that leaves enough pieces.
  const int64_t tall = kernels_of(*this).queries;
  const bool enough =
      layout.kv_heads * ceil_div(chunk.length * group, tall) >= threads * kPiecesPerThread;
  const int64_t piece_rows = std::max<int64_t>(1, (enough ? tall : kMaxQueries) / group);
  queries_ = std::max(queries_, std::min(piece_rows, chunk.length) * group);
  for (int64_t row = 0; row < chunk.length; row += piece_rows) {
    Piece piece{};
    piece.partial = -1;
    piece.parts = 1;
    piece.chunk = int32_t(index);
    piece.row = row;
    piece.rows = std::min(piece_rows, chunk.length - row);
    piece.panels = panels_to(layout, chunk.start + row + piece.rows - 1);
    // A piece takes as many heads as fit. All pieces have the same number.
    const int64_t queries = piece.rows * group;
    int64_t max_heads = std::clamp<int64_t>(kMaxQueries / queries, 1, layout.kv_heads);
    // Parts of keys would share the work of few rows better, but their sums depend on the plan.
    if (fixed_order) max_heads = std::min(max_heads, ceil_div(layout.kv_heads, int64_t(threads)));
    const int64_t each = ceil_div(layout.kv_heads, ceil_div(layout.kv_heads, max_heads));
    for (int64_t head = 0; head < layout.kv_heads; head += each) {
      piece.kv_head = int32_t(head);
      piece.kv_heads = int32_t(std::min(each, layout.kv_heads - head));
      piece.cost = double(piece.panels * piece.kv_heads) *
                   double(std::max(queries, kQueriesPerRead)) / double(kQueriesPerRead);
      pieces_.push_back(piece);
    }
  }
}

void Plan::add_written(size_t index) {
  const Chunk& chunk = chunks[index];
  for (int64_t row = 0; row < chunk.length;) {
    const int64_t slot = (chunk.start + row) % layout.block;
    const int64_t free_slots = std::min(layout.block - slot, kLanes - slot % kLanes);
    written_.push_back({int32_t(index), row, std::min(free_slots, chunk.length - row)});
    row += written_.back().rows;
  }
}

// Divides pieces that cost more than `max_cost` into parts.
void Plan::split(double max_cost, int threads) {
  std::vector<Piece> uncut;
  uncut.swap(pieces_);
  const int64_t bytes = 2 * layout.panel() * int64_t(size_of(layout.dtype));
  for (Piece piece : uncut) {
    const int64_t panels = piece.panels;
    const int64_t min_panels = ceil_div(kMinPartBytes, bytes * piece.kv_heads);
    int64_t parts = std::clamp<int64_t>(int64_t(std::ceil(piece.cost / max_cost)), 1,
                                        ceil_div(panels, min_panels));
    if (parts > threads) parts -= parts % threads;
    piece.parts = int32_t(parts);
    piece.first_partial = int32_t(partials_);
    piece.group = int32_t(groups_);
    for (int64_t part = 0; part < parts; ++part) {
      piece.panel = panels * part / parts;
      piece.panels = panels * (part + 1) / parts - piece.panel;
      piece.partial = parts > 1 ? int32_t(partials_ + part) : -1;
      pieces_.push_back(piece);
    }
    if (parts > 1) partials_ += parts;
    if (parts > 1) ++groups_;
  }
}

// Puts expensive pieces first, so that small ones are left for the end. If a chunk has several
// pieces, they follow each other head by head instead: they read the same keys and values, which
// are then still in a core's cache.
void Plan::sort() {
  const auto only_piece = [&](const Piece& a) { return a.rows == chunks[size_t(a.chunk)].length; };
  std::stable_sort(pieces_.begin(), pieces_.end(), [&](const Piece& a, const Piece& b) {
    if (only_piece(a) != only_piece(b)) return only_piece(b);
    if (!only_piece(a)) {
      const auto first = std::pair(a.chunk, a.kv_head), second = std::pair(b.chunk, b.kv_head);
      if (first != second) return first < second;
    }
    return a.cost / a.parts > b.cost / b.parts;
  });
}

const Kernels& kernels_of(const Plan& plan) {
  const Dtype dtype = plan.layout.dtype;
  const Kernels& best = kernels(runtime::isa(dtype));
  const bool tiles = best.attend[int(dtype)] && !plan.fixed_order;
  return tiles ? best : kernels(runtime::vector_isa(dtype));
}

int64_t scratch_floats(const Plan& plan) {
  const int64_t padded = plan.layout.padded(), block = kBlockPanels * kLanes;
  const int64_t vectors = plan.queries() * (kMaxDim + kLanes + padded + block + kLanes + 4);
  // With tiles, queries may take twice as many slots, and some panels of values are copied to
  // scratch.
  const int64_t tiles =
      2 * plan.queries() * (2 * padded + block + 2 * kLanes + 1) + block * padded / 2;
  return std::max(vectors, tiles) + 256;
}

void attend(const Kernels& kernels, const Problem& problem, int threads) {
  const Plan& plan = *problem.plan;
  const auto write = kernels.write[int(plan.layout.dtype)];
  const auto& written = plan.written();
  if (!written.empty())
    runtime::share_out(threads, int64_t(written.size()),
                       [&](int64_t i) { write(problem, written[size_t(i)]); });
  const auto kernel = kernels.attend[int(plan.layout.dtype)];
  static thread_local runtime::Scratch partial_scratch;
  const int64_t size = partial_floats(plan);
  float* const partials = plan.partials() ? partial_scratch.get(plan.partials() * size) : nullptr;
  const std::unique_ptr<std::atomic<int32_t>[]> done(
      new std::atomic<int32_t>[size_t(plan.groups())]());
  const auto& pieces = plan.pieces();
  runtime::share_out(threads, int64_t(pieces.size()), [&](int64_t i) {
    static thread_local runtime::Scratch scratch;
    const Piece& piece = pieces[size_t(i)];
    float* const partial = piece.partial < 0 ? nullptr : partials + piece.partial * size;
    kernel(problem, piece, scratch.get(scratch_floats(plan)), partial);
    if (!partial) return;
    // The thread that finishes a group's last part combines the parts.
    if (done[size_t(piece.group)].fetch_add(1, std::memory_order_acq_rel) + 1 < piece.parts) return;
    kernels.combine(problem, piece, partials + piece.first_partial * size);
  });
}

}  // namespace vlora::attention

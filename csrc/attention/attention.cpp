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

constexpr int64_t kPiecesOfThread = 8;
// So many pieces for each thread, that the last ones end together.
constexpr int64_t kLeastBytes = 262144;
// Of a part: shorter ones are not worth a partial result.
constexpr int64_t kItemsOfRead = 12;
// (row, head) pairs whose products with a panel take about as long as reading it does.

// Panels of positions 0 … position.
int64_t panels_to(const Layout& layout, int64_t position) {
  return position / layout.block * layout.panels() + position % layout.block / kLanes + 1;
}

}  // namespace

Plan::Plan(const Layout& l, int64_t h, std::vector<Chunk> c, std::vector<int32_t> p, int threads)
    : layout(l), heads(h), chunks(std::move(c)), pages(std::move(p)) {
  if (layout.kv_heads < 1 || heads < 1 || heads % layout.kv_heads)
    throw std::invalid_argument(std::to_string(heads) + " heads over " +
                                std::to_string(layout.kv_heads) + " of keys and values");
  const int64_t group = heads / layout.kv_heads;
  if (layout.dim < 2 || layout.dim > kMostDim || group > kMostTiles * kTileItems)
    throw std::invalid_argument("heads of " + std::to_string(layout.dim) + ", " +
                                std::to_string(group) + " to one of keys and values");
  items_ = std::max(kItems, group);
  double work = 0;
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
        throw std::invalid_argument("page " + std::to_string(pages[size_t(page)]) + " of " +
                                    std::to_string(layout.pages));
    rows_ += chunk.length;
    // As many rows as a piece may have, if there are pieces enough then.
    const int64_t tall = kernels_of(layout.dtype).items;
    const bool enough = layout.kv_heads * ceil_div(chunk.length * group, tall) >= threads * kPiecesOfThread;
    const int64_t rows_of_block = std::max<int64_t>(1, (enough ? tall : kItems) / group);
    items_ = std::max(items_, std::min(rows_of_block, chunk.length) * group);
    for (int64_t row = 0; row < chunk.length; row += rows_of_block) {
      Piece piece{};
      piece.shared = -1;
      piece.parts = 1;
      piece.chunk = int32_t(i);
      piece.row = row;
      piece.rows = std::min(rows_of_block, chunk.length - row);
      piece.panels = panels_to(layout, chunk.start + row + piece.rows - 1);
      // As many heads as there is room for, the same number in each piece.
      const int64_t items = piece.rows * group;
      const int64_t most = std::clamp<int64_t>(kItems / items, 1, layout.kv_heads);
      const int64_t each = ceil_div(layout.kv_heads, ceil_div(layout.kv_heads, most));
      for (int64_t head = 0; head < layout.kv_heads; head += each) {
        piece.kv_head = int32_t(head);
        piece.kv_heads = int32_t(std::min(each, layout.kv_heads - head));
        piece.cost = double(piece.panels * piece.kv_heads) *
                     double(std::max(items, kItemsOfRead)) / double(kItemsOfRead);
        work += piece.cost;
        pieces_.push_back(piece);
      }
    }
    for (int64_t row = 0; chunk.length > 1 && row < chunk.length;) {
      const int64_t slot = (chunk.start + row) % layout.block;
      const int64_t room = std::min(layout.block - slot, kLanes - slot % kLanes);
      written_.push_back({int32_t(i), row, std::min(room, chunk.length - row)});
      row += written_.back().rows;
    }
  }
  if (threads > 1) share(work / double(threads * kPiecesOfThread), threads);
  // Large ones first: what is left at the end is small. But those of one chunk's long rows read the same
  // keys and values one after the other, while a core still has them.
  const auto alone = [&](const Piece& a) { return a.rows == chunks[size_t(a.chunk)].length; };
  std::stable_sort(pieces_.begin(), pieces_.end(), [&](const Piece& a, const Piece& b) {
    if (alone(a) != alone(b)) return alone(b);
    if (!alone(a)) {
      const auto place = std::pair(a.chunk, a.kv_head), other = std::pair(b.chunk, b.kv_head);
      if (place != other) return place < other;
    }
    return a.cost / a.parts > b.cost / b.parts;
  });
}

// Cuts what costs more than `most` into parts.
void Plan::share(double most, int threads) {
  std::vector<Piece> whole;
  whole.swap(pieces_);
  const int64_t bytes = 2 * layout.panel() * (layout.dtype == Dtype::kFp32 ? 4 : 2);
  for (Piece piece : whole) {
    const int64_t panels = piece.panels;
    const int64_t least = ceil_div(kLeastBytes, bytes * piece.kv_heads);
    int64_t parts =
        std::clamp<int64_t>(int64_t(std::ceil(piece.cost / most)), 1, ceil_div(panels, least));
    if (parts > threads) parts -= parts % threads;
    piece.parts = int32_t(parts);
    piece.first = int32_t(partials_);
    piece.group = int32_t(groups_);
    for (int64_t part = 0; part < parts; ++part) {
      piece.panel = panels * part / parts;
      piece.panels = panels * (part + 1) / parts - piece.panel;
      piece.shared = parts > 1 ? int32_t(partials_ + part) : -1;
      pieces_.push_back(piece);
    }
    if (parts > 1) partials_ += parts;
    if (parts > 1) ++groups_;
  }
}

const Kernels& kernels_of(Dtype dtype) {
  const Kernels& found = kernels(runtime::isa(dtype));
  return found.attend[int(dtype)] ? found : kernels(runtime::vector_isa(dtype));
}

int64_t scratch_floats(const Plan& plan) {
  const int64_t padded = plan.layout.padded(), block = kBlockPanels * kLanes;
  // Items of tiles may take twice as many slots, and some panels of values are copied.
  const int64_t vectors = plan.items() * (kMostDim + kLanes + padded + block + kLanes + 4);
  const int64_t tiles = 2 * plan.items() * (2 * padded + block + 2 * kLanes + 1) + block * padded / 2;
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
  const std::unique_ptr<std::atomic<int32_t>[]> done(new std::atomic<int32_t>[size_t(plan.groups())]());
  const auto& pieces = plan.pieces();
  runtime::share_out(threads, int64_t(pieces.size()), [&](int64_t i) {
    static thread_local runtime::Scratch scratch;
    const Piece& piece = pieces[size_t(i)];
    float* const partial = piece.shared < 0 ? nullptr : partials + piece.shared * size;
    kernel(problem, piece, scratch.get(scratch_floats(plan)), partial);
    if (!partial) return;
    // Whoever ends last puts the parts together.
    if (done[size_t(piece.group)].fetch_add(1, std::memory_order_acq_rel) + 1 < piece.parts) return;
    kernels.combine(problem, piece, partials + piece.first * size);
  });
}

}  // namespace vlora::attention

#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace vlora::attention {
namespace {

constexpr int64_t kLeastPanels = 8;
// Of a part: shorter ones are not worth a partial result.
constexpr int64_t kPiecesOfThread = 8;
// So many pieces for each thread, that the last ones end together.
constexpr int64_t kSerialRows = 8;
// Up to so many rows are written by the caller alone.

// Panels of positions 0 … position.
int64_t panels_to(const Layout& layout, int64_t position) {
  return position / layout.block * layout.panels() + position % layout.block / kLanes + 1;
}

// The parts of rows whose keys were shared out, as one.
void combine(const Problem& p, const Piece& piece, const float* partials) {
  const Plan& plan = *p.plan;
  const int64_t group = plan.heads / plan.layout.kv_heads, items = piece.rows * group;
  const int64_t padded = plan.layout.padded(), dim = plan.layout.dim, size = partial_floats(plan);
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  for (int64_t i = 0; i < items; ++i) {
    float most = -INFINITY;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float here = partials[part * size + i];
      if (!(here <= most)) most = here;  // a NaN stays
    }
    float* y = p.y + (chunk.row + piece.row + i / group) * p.y_stride +
               (piece.kv_head * group + i % group) * dim;
    std::fill(y, y + dim, 0.0f);
    float sum = 0;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float* from = partials + part * size;
      if (from[i] == -INFINITY) continue;
      const float weight = std::exp(from[i] - most);
      sum += weight * from[plan.items() + i];
      const float* values = from + 2 * plan.items() + i * padded;
      for (int64_t d = 0; d < dim; ++d) y[d] += weight * values[d];
    }
    for (int64_t d = 0; d < dim; ++d) y[d] /= sum;
  }
}

}  // namespace

Plan::Plan(const Layout& l, int64_t h, std::vector<Chunk> c, std::vector<int32_t> p, int threads)
    : layout(l), heads(h), chunks(std::move(c)), pages(std::move(p)) {
  if (layout.kv_heads < 1 || heads < 1 || heads % layout.kv_heads)
    throw std::invalid_argument(std::to_string(heads) + " heads over " +
                                std::to_string(layout.kv_heads) + " of keys and values");
  const int64_t group = heads / layout.kv_heads;
  const int64_t rows_of_block = std::max<int64_t>(1, kItems / group);
  items_ = rows_of_block * group;
  double work = 0;  // panels times rows
  for (const Chunk& chunk : chunks) {
    const int64_t used = ceil_div(chunk.start + chunk.length, layout.block);
    if (chunk.row != rows_ || chunk.length < 1 || chunk.start < 0 || chunk.first_page < 0 ||
        chunk.first_page + used > int64_t(pages.size()))
      throw std::invalid_argument("chunk (row " + std::to_string(chunk.row) + ", length " +
                                  std::to_string(chunk.length) + ", start " +
                                  std::to_string(chunk.start) + ") does not fit the plan");
    for (int64_t i = chunk.first_page; i < chunk.first_page + used; ++i)
      if (pages[size_t(i)] < 0 || pages[size_t(i)] >= layout.pages)
        throw std::invalid_argument("page " + std::to_string(pages[size_t(i)]) + " of " +
                                    std::to_string(layout.pages));
    rows_ += chunk.length;
    for (int64_t row = 0; row < chunk.length; row += rows_of_block)
      work += double(panels_to(layout, std::min(chunk.length, row + rows_of_block) - 1 + chunk.start));
  }
  const double share = work * double(layout.kv_heads) / double(threads * kPiecesOfThread);
  const int64_t most = std::max(kLeastPanels, int64_t(share));
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    for (int64_t row = 0; row < chunk.length; row += rows_of_block) {
      const int64_t rows = std::min(rows_of_block, chunk.length - row);
      const int64_t panels = panels_to(layout, chunk.start + row + rows - 1);
      const int64_t parts = threads > 1 ? ceil_div(panels, most) : 1;
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t from = panels * part / parts, to = panels * (part + 1) / parts;
          pieces_.push_back({int32_t(i), head, row, rows, from, to - from,
                             parts > 1 ? int32_t(partials_ + part) : -1, int32_t(partials_),
                             int32_t(parts),
                             int32_t(groups_)});
        }
        if (parts > 1) partials_ += parts;
        if (parts > 1) ++groups_;
      }
    }
  }
  // Large ones first: what is left at the end is small.
  std::stable_sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) {
    return a.panels * a.rows > b.panels * b.rows;
  });
}

int64_t scratch_floats(const Plan& plan) {
  const int64_t padded = plan.layout.padded();
  return plan.items() * (2 * padded + kBlockPanels * kLanes + 4) + 256;
}

void attend(const Kernels& kernels, const Problem& problem, int threads) {
  const Plan& plan = *problem.plan;
  const auto kernel = kernels.attend[int(plan.layout.dtype)];
  static thread_local cpu::Scratch partial_scratch;
  const int64_t size = partial_floats(plan);
  float* const partials = plan.partials() ? partial_scratch.get(plan.partials() * size) : nullptr;
  const std::unique_ptr<std::atomic<int32_t>[]> done(new std::atomic<int32_t>[size_t(plan.groups())]());
  const auto& pieces = plan.pieces();
  cpu::share_out(threads, int64_t(pieces.size()), [&](int64_t i) {
    static thread_local cpu::Scratch scratch;
    const Piece& piece = pieces[size_t(i)];
    float* const partial = piece.shared < 0 ? nullptr : partials + piece.shared * size;
    kernel(problem, piece, scratch.get(scratch_floats(plan)), partial);
    if (!partial) return;
    // Whoever ends last puts the parts together.
    if (done[size_t(piece.group)].fetch_add(1, std::memory_order_acq_rel) + 1 < piece.parts) return;
    combine(problem, piece, partials + piece.first * size);
  });
}

void write(const Kernels& kernels, const Writing& writing, int threads) {
  const Plan& plan = *writing.plan;
  const auto kernel = kernels.write[int(plan.layout.dtype)];
  const int64_t each = plan.rows() <= kSerialRows ? plan.rows() : 4;
  if (plan.rows() == 0) return;
  cpu::share_out(threads, ceil_div(plan.rows(), each), [&](int64_t i) {
    const int64_t from = i * each, until = std::min(plan.rows(), from + each);
    // The chunk that holds the first row, then those after it.
    auto chunk = std::upper_bound(plan.chunks.begin(), plan.chunks.end(), from,
                                  [](int64_t row, const Chunk& c) { return row < c.row; }) -
                 1;
    for (; chunk != plan.chunks.end() && chunk->row < until; ++chunk)
      kernel(writing, *chunk, std::max(from, chunk->row),
             std::min(until, chunk->row + chunk->length));
  });
}

}  // namespace vlora::attention

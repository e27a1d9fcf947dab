// Work of a product in pieces that threads share.
#pragma once

#include <algorithm>

#include "quantized/quantized.h"
#include "runtime/threads.h"

namespace vlora::quantized {

// From this many rows of x on, the threads share its packing.
constexpr int64_t kMinSharedPackRows = 64;
// Bytes of W in a piece of a product with few rows. Reading them from memory takes about 5 µs.
constexpr int64_t kPieceBytes = 64 << 10;

// Returns the number of panels of kTilePanelRows rows in a piece: a multiple of `together`, the
// number that a kernel multiplies at the same time. Rows that fill no panel count as one.
inline int64_t panels_of_piece(const Weight& w, int threads, int64_t together = 1) {
  const int64_t share = ceil_div(ceil_div(w.n, kTilePanelRows), int64_t(threads) * 8),
                fitting = kPieceBytes / (kTilePanelRows * std::max<int64_t>(1, w.row_bytes()));
  return ceil_div(std::max<int64_t>(1, std::min(share, fitting)), together) * together;
}

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

// Calls pack(from, until) for all `parts` of x, which has `rows` rows.
template <class Pack>
void pack_parts(int64_t rows, int64_t parts, int threads, const Pack& pack) {
  if (rows < kMinSharedPackRows) return pack(0, parts);
  runtime::share_out(threads, parts, [&](int64_t i) { pack(i, i + 1); });
}

}  // namespace vlora::quantized

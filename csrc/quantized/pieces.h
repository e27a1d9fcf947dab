// Work of a product in pieces that threads share.
#pragma once

#include <algorithm>

#include "runtime/threads.h"
#include "runtime/types.h"

namespace vlora::quantized {

// From this many rows of x on, the threads share its packing.
constexpr int64_t kMinSharedPackRows = 64;

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

// out = in + sign * B A for many matrices (§4.4.1).
#include <atomic>
#include <cstring>
#include <vector>

#include "atmm/operator.h"
#include "atmm/threads.h"
#include "walk.h"

namespace vlora::atmm {
namespace {

// Columns [first, first + columns) of A as panels: whole lines are copied, since a line of A is one of
// a bundle. The last panel is filled up with zeros.
void pack_columns(float* to, const Merge& m, int64_t first, int64_t columns, int bundle) {
  for (int64_t at = 0; at < columns; at += bundle * kPanel) {
    const int64_t count = std::min<int64_t>(bundle * kPanel, columns - at);
    const int64_t width = ceil_div(count, kPanel) * kPanel;
    for (int64_t r = 0; r < m.rank; ++r, to += width) {
      std::memcpy(to, m.a + r * m.d_in + first + at, size_t(count) * sizeof(float));
      std::fill(to + count, to + width, 0.0f);
    }
  }
}

// Columns [first, first + columns) of one matrix: A's columns packed once, all rows past them.
void merge_columns(const Kernels& kernels, Dtype dtype, char* out, const char* in, const Merge& m,
                   float sign, const TileConfig& config, int64_t first, int64_t columns) {
  const ptrdiff_t size = ptrdiff_t(size_of(dtype));
  thread_local Scratch scratch;
  const Panels panels{nullptr, ceil_div(columns, kPanel), m.rank, kernels.bundle, false};
  float* packed = scratch.get(panels.count * m.rank * kPanel);
  pack_columns(packed, m, first, columns, panels.bundle);
  // Whole cache lines only. In place, what was read is in cache and is written there.
  const bool streaming = in != out && reinterpret_cast<uintptr_t>(out + m.offset * size) % 64 == 0 &&
                         m.d_in * size % 64 == 0;
  Walk w{};
  w.kernels = (streaming ? kernels.merge_streaming : kernels.merge)[int(dtype)];
  w.max_rows = kernels.max_rows;
  w.most_rows = int(kFewRows);
  w.columns = std::min(config.expand_columns / kPanel, kernels.bundle);
  w.last = panels.count;
  w.steps = m.rank;
  w.x_row = m.rank * 4;
  w.out_row = w.in_row = m.d_in * size;
  w.out_panel = w.in_panel = kPanel * size;
  w.tail = int32_t(columns - (panels.count - 1) * kPanel);
  static const int64_t env = getenv("CHUNK") ? atoi(getenv("CHUNK")) : kPanelBytes;
  w.panel_bytes = env;
  const int64_t block = std::max(1, config.row_block);
  for (int64_t row = 0; row < m.d_out; row += block) {
    const int64_t at = m.offset + row * m.d_in + first;
    Tile t{};
    t.x = m.b + row * m.rank;
    t.x_stride = m.rank;
    t.out = out + at * size;
    t.in = in + at * size;
    t.out_stride = t.in_stride = m.d_in;
    t.sign = sign;
    static const int64_t ahead = getenv("AHEAD") ? atoi(getenv("AHEAD")) : 0;
    t.in_ahead = ahead;
    w.rows = std::min(block, m.d_out - row);
    walk(w, {reinterpret_cast<const char*>(packed), panels.count, panels.steps, panels.bundle, false}, t);
  }
  if (streaming) __builtin_ia32_sfence();
}

}  // namespace

void merge(const Kernels& kernels, Dtype dtype, void* out, const void* in, const Merge* merges,
           int64_t count, float sign, const Chooser& chooser, int threads) {
  struct Task {
    const Merge* merge;
    TileConfig config;
    int64_t first, columns;
  };
  std::vector<Task> tasks;
  for (const Merge* m = merges; m != merges + count; ++m) {
    const TileConfig config = chooser.choose(
        {Operation::kMerge, dtype, m->d_out, m->d_in, m->d_out, m->rank, count});
    const int64_t block = std::max(kPanel, config.column_block);
    for (int64_t at = 0; at < m->d_in; at += block)
      tasks.push_back({m, config, at, std::min(block, m->d_in - at)});
  }
  std::atomic<size_t> taken{0};
  auto work = [&](int, int) {
    for (size_t i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
      const Task& task = tasks[i];
      merge_columns(kernels, dtype, static_cast<char*>(out), static_cast<const char*>(in),
                    *task.merge, sign, task.config, task.first, task.columns);
    }
  };
  run_on(int(std::min<size_t>(size_t(std::max(1, threads)), tasks.size())), work);
}

}  // namespace vlora::atmm

// The loops around the register tiles: blocks of rows and depth, segments, threads.
#include "atmm/operator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "atmm/threads.h"

namespace vlora::atmm {
namespace {

constexpr int64_t kRankBlock = kDepth;
// Ranks whose intermediate fits a row of scratch; larger ranks take several.
constexpr int64_t kPanelBytes = 256 << 10;
// Of panels that several row tiles read in turn: a quarter of a 1 MiB L2.
constexpr int64_t kFewRows = 8;
// Rows that one register tile holds whatever its columns: a segment of so few streams its adapter.
constexpr double kWorthThreads = 8e-6;
// Seconds of work below which waking a second thread costs more than it brings.
constexpr double kFlopRate = 100e9, kByteRate = 60e9;
// A cautious core, for that estimate alone.

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of one thread, kept from call to call.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      std::free(memory_);
      size_ = ceil_div(floats, 1024) * 1024;
      memory_ = std::aligned_alloc(64, size_t(size_) * sizeof(float));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return static_cast<float*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

thread_local Scratch row_scratch, rank_scratch;

// Rows of a product's left side.
struct Rows {
  const float* at;
  ptrdiff_t stride;  // units of 4 bytes
  bool packed;       // the stride is kRowStride
};

// How to walk a product of `rows` rows and `panels` panels with register tiles.
struct Walk {
  const TileKernel (*kernels)[kMaxRows];
  const int* max_rows;
  int most_rows;
  int64_t rows, panels;
  int columns;               // panels in registers, at most
  ptrdiff_t out_row, in_row; // bytes from row to row
  ptrdiff_t out_panel, in_panel;
  int32_t tail;
  bool prefetch_next_group;
};

void walk(const Walk& w, const Tile& whole) {
  int columns = int(std::min<int64_t>(w.columns, w.panels));
  const auto limit = [&](int c) { return std::min(w.max_rows[c - 1], w.most_rows); };
  // Few rows: narrower tiles rather than two passes over the panels.
  if (w.rows <= limit(1))
    while (columns > 1 && limit(columns) < w.rows) --columns;
  columns = int(ceil_div(w.panels, ceil_div(w.panels, columns)));
  for (int64_t panel = 0; panel < w.panels;) {
    int64_t groups = (w.panels - panel) / columns;
    if (groups == 0) {
      columns = int(w.panels - panel);
      groups = 1;
    }
    const int64_t tiles = ceil_div(w.rows, limit(columns));
    // Several row tiles read the same panels: as many of them as stay in L2 meanwhile.
    if (tiles > 1)
      groups = std::clamp<int64_t>(kPanelBytes / (columns * whole.steps * 64), 1, groups);
    Tile t = whole;
    t.groups = groups;
    t.panels = whole.panels + panel * whole.panel_bytes;
    const int64_t end = panel + groups * columns;
    t.tail = end == w.panels ? w.tail : kPanel;
    if (w.prefetch_next_group) t.prefetch = columns * whole.panel_bytes;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = w.rows * i / tiles, count = w.rows * (i + 1) / tiles - first;
      t.x = static_cast<const char*>(whole.x) + first * whole.x_stride * 4;
      t.out = static_cast<char*>(whole.out) + first * w.out_row + panel * w.out_panel;
      t.in = static_cast<const char*>(whole.in) + first * w.in_row + panel * w.in_panel;
      w.kernels[columns - 1][count - 1](t);
    }
    panel = end;
  }
}

// One call's constants.
struct Call {
  const Kernels& kernels;
  const Problem& p;
  bool one_order;

  bool pairs() const { return p.dtype == Dtype::kBf16 && kernels.pairs_in_registers; }
  bool widened() const { return p.dtype == Dtype::kBf16 && !kernels.pairs_in_registers; }
  // Steps of depth for so many elements, and units of 4 bytes in a row of scratch.
  int64_t steps(int64_t elements) const {
    return p.dtype == Dtype::kBf16 ? ceil_div(elements, 2) : elements;
  }
  int64_t units(int64_t elements) const {
    if (pairs()) return ceil_div(elements, 2);
    return widened() ? ceil_div(elements, 2) * 2 : elements;
  }
  int64_t elements_in(int64_t units) const { return pairs() ? units * 2 : units / 2 * 2; }

  const Pair& pair(const Segment& s, int output) const {
    return p.pairs[int64_t(s.slot) * p.outputs + output];
  }
  const char* x(int64_t row, int64_t k) const {
    return static_cast<const char*>(p.x) + (row * p.x_stride + k) * ptrdiff_t(size_of(p.dtype));
  }
  // Rows can be read where they lie: whole units, and no conversion.
  bool readable() const {
    if (p.dtype == Dtype::kFp32) return true;
    return pairs() && p.x_stride % 2 == 0 && p.d_in % 2 == 0;
  }
};

int64_t panels_of(const Pair& pair) { return ceil_div(pair.rank, kPanel); }
int64_t rank_blocks(const Pair& pair) { return ceil_div(pair.rank, kRankBlock); }

// Panels [first, last) of one output's x A^T, for a depth block, to `low` (one block of `rows` rows
// of scratch per kRankBlock ranks).
void shrink(const Call& c, const TileConfig& config, const Pair& pair, int64_t rows, const Rows& x,
            int64_t k, int64_t count, float* low, int64_t first, int64_t last, bool begin) {
  const TileSet& set = c.kernels.shrink[int(c.p.dtype)];
  const bool few = rows <= kFewRows && !c.one_order;
  constexpr int64_t kBlockPanels = kRankBlock / kPanel;
  for (int64_t block = first / kBlockPanels; block * kBlockPanels < last; ++block) {
    const int64_t from = std::max(first, block * kBlockPanels);
    const int64_t to = std::min(last, (block + 1) * kBlockPanels);
    Tile t{};
    t.x = x.at;
    t.x_stride = x.stride;
    t.panel_bytes = c.steps(c.p.d_in) * 64;
    t.panels = static_cast<const char*>(pair.a) + from * t.panel_bytes + c.steps(k) * 64;
    t.steps = c.steps(count);
    t.out = low + block * rows * kRowStride + (from - block * kBlockPanels) * kPanel;
    t.first = begin;
    t.prefetch = config.prefetch * 64;
    Walk w{};
    w.kernels = few ? set.parallel : x.packed ? set.packed : set.direct;
    w.max_rows = c.kernels.max_rows;
    w.most_rows = few || !x.packed ? int(kFewRows) : kMaxRows;
    w.rows = rows;
    w.panels = to - from;
    w.columns = std::max(1, config.shrink_columns / kPanel);
    w.out_row = kRowStride * 4;
    w.out_panel = kPanel * 4;
    w.tail = kPanel;
    walk(w, t);
  }
}

// Depth blocks of x, made ready in turn and passed to `use(rows, k, count)`.
template <class Use>
void over_depth(const Call& c, const TileConfig& config, int64_t row, int64_t rows, const Use& use) {
  const int64_t d_in = c.p.d_in;
  if (!config.pack_rows && c.readable()) {
    const int64_t depth = !config.depth_block ? d_in
                          : c.pairs()         ? 2 * config.depth_block
                                              : config.depth_block;
    for (int64_t k = 0; k < d_in; k += depth) {
      const Rows x{reinterpret_cast<const float*>(c.x(row, k)),
                   c.pairs() ? c.p.x_stride / 2 : c.p.x_stride, false};
      use(x, k, std::min(depth, d_in - k));
    }
    return;
  }
  if (!config.pack_rows && rows <= kFewRows) {
    // Not readable in place: once into scratch, whole.
    const ptrdiff_t stride = ceil_div(c.units(d_in), 16) * 16 + 16;
    float* scratch = row_scratch.get(rows * stride);
    c.kernels.load_rows(c.p.dtype, c.x(row, 0), c.p.x_stride, rows, d_in, scratch, stride);
    use(Rows{scratch, stride, false}, int64_t(0), d_in);
    return;
  }
  const int64_t block = config.depth_block ? std::min<int64_t>(config.depth_block, kDepth) : kDepth;
  const int64_t depth = c.p.dtype == Dtype::kFp32 ? block : c.elements_in(block);
  float* scratch = row_scratch.get(rows * kRowStride);
  for (int64_t k = 0; k < d_in; k += depth) {
    const int64_t count = std::min(depth, d_in - k);
    c.kernels.load_rows(c.p.dtype, c.x(row, k), c.p.x_stride, rows, count, scratch, kRowStride);
    use(Rows{scratch, kRowStride, true}, k, count);
  }
}

// The intermediate as the second product reads it.
void finish_low(const Call& c, const Pair& pair, int64_t rows, float* low) {
  if (c.p.dtype != Dtype::kBf16) return;
  for (int64_t block = 0; block < rank_blocks(pair); ++block)
    c.kernels.round_rows(low + block * rows * kRowStride, rows,
                         std::min<int64_t>(kRankBlock, pair.rank - block * kRankBlock));
}

// Panels [first, last) of one output's columns: y += sign * low B^T.
void expand(const Call& c, const TileConfig& config, const Segment& s, int output, int64_t row,
            int64_t rows, const float* low, int64_t first, int64_t last) {
  const Pair& pair = c.pair(s, output);
  const Output& out = c.p.output[output];
  const ptrdiff_t size = ptrdiff_t(size_of(c.p.dtype));
  const TileSet& set = c.kernels.expand[int(c.p.dtype)];
  const bool few = rows <= kFewRows && !c.one_order;
  char* y = static_cast<char*>(c.p.y) + (row * c.p.y_stride + out.column + first * kPanel) * size;
  for (int64_t block = 0; block < rank_blocks(pair); ++block) {
    const int64_t ranks = std::min<int64_t>(kRankBlock, pair.rank - block * kRankBlock);
    Tile t{};
    t.x = low + block * rows * kRowStride;
    t.x_stride = kRowStride;
    t.panel_bytes = c.steps(pair.rank) * 64;
    t.panels = static_cast<const char*>(pair.b) + first * t.panel_bytes +
               c.steps(block * kRankBlock) * 64;
    t.steps = c.steps(ranks);
    t.out = y;
    t.in = y;
    t.out_stride = t.in_stride = c.p.y_stride;
    t.sign = float(s.sign);
    Walk w{};
    w.kernels = few ? set.parallel : set.packed;
    w.max_rows = c.kernels.max_rows;
    w.most_rows = few ? int(kFewRows) : kMaxRows;
    w.rows = rows;
    w.panels = last - first;
    w.columns = std::max(1, config.expand_columns / kPanel);
    w.out_row = w.in_row = c.p.y_stride * size;
    w.out_panel = w.in_panel = kPanel * size;
    w.tail = int32_t(std::min<int64_t>(kPanel, out.d_out - (last - 1) * kPanel));
    w.prefetch_next_group = config.prefetch > 0;
    walk(w, t);
  }
}

// Both products of a block of rows, all outputs, back to back.
void whole_block(const Call& c, const TileConfig& config, const Segment& s, int64_t row,
                 int64_t rows) {
  float* low[kMaxOutputs];
  int64_t floats = 0;
  for (int o = 0; o < c.p.outputs; ++o) floats += rank_blocks(c.pair(s, o)) * rows * kRowStride;
  float* next = rank_scratch.get(floats);
  for (int o = 0; o < c.p.outputs; ++o) {
    low[o] = next;
    next += rank_blocks(c.pair(s, o)) * rows * kRowStride;
  }
  over_depth(c, config, row, rows, [&](const Rows& x, int64_t k, int64_t count) {
    for (int o = 0; o < c.p.outputs; ++o) {
      const Pair& pair = c.pair(s, o);
      if (pair.rank)
        shrink(c, config, pair, rows, x, k, count, low[o], 0, panels_of(pair), k == 0);
    }
  });
  for (int o = 0; o < c.p.outputs; ++o) {
    const Pair& pair = c.pair(s, o);
    if (!pair.rank) continue;
    finish_low(c, pair, rows, low[o]);
    expand(c, config, s, o, row, rows, low[o], 0, ceil_div(c.p.output[o].d_out, kPanel));
  }
}

// A segment with its tile and its blocks of rows.
struct Unit {
  const Segment* segment;
  TileConfig config;
  int64_t blocks;
  int64_t first_block;  // counted over the wave
};

// The part of a wave that one thread does when there are too few blocks for all threads: first its
// share of all panels of A, then, when all have, its share of the columns of y.
struct Item {
  const Unit* unit;
  int output;
  float* low;
  int64_t shrink_first, expand_first;  // shares of work before this item
};

void share(int64_t total, int thread, int threads, int64_t before, int64_t weight, int64_t panels,
           int64_t* first, int64_t* last) {
  const int64_t from = total * thread / threads, to = total * (thread + 1) / threads;
  *first = std::clamp<int64_t>(ceil_div(from - before, weight), 0, panels);
  *last = std::clamp<int64_t>(ceil_div(to - before, weight), 0, panels);
}

void split_wave(const Call& c, const std::vector<Unit>& units, int threads) {
  std::vector<Item> items;
  int64_t floats = 0, shrink_total = 0, expand_total = 0;
  for (const Unit& unit : units)
    for (int o = 0; o < c.p.outputs; ++o) {
      const Pair& pair = c.pair(*unit.segment, o);
      if (!pair.rank) continue;
      items.push_back({&unit, o, nullptr, shrink_total, expand_total});
      shrink_total += panels_of(pair);
      expand_total += ceil_div(c.p.output[o].d_out, kPanel) * pair.rank;
      floats += rank_blocks(pair) * unit.segment->length * kRowStride;
    }
  thread_local Scratch shared;
  float* next = shared.get(floats);
  for (Item& item : items) {
    item.low = next;
    next += rank_blocks(c.pair(*item.unit->segment, item.output)) * item.unit->segment->length *
            kRowStride;
  }
  Barrier barrier;
  auto work = [&](int thread, int count) {
    int64_t first, last;
    for (const Item& item : items) {
      const Segment& s = *item.unit->segment;
      const Pair& pair = c.pair(s, item.output);
      share(shrink_total, thread, count, item.shrink_first, 1, panels_of(pair), &first, &last);
      if (first < last)
        over_depth(c, item.unit->config, s.start, s.length,
                   [&](const Rows& x, int64_t k, int64_t elements) {
                     shrink(c, item.unit->config, pair, s.length, x, k, elements, item.low, first,
                            last, k == 0);
                   });
    }
    barrier.wait(count);
    if (c.p.dtype == Dtype::kBf16) {  // little work: one thread, then all go on
      if (thread == 0)
        for (const Item& item : items)
          finish_low(c, c.pair(*item.unit->segment, item.output), item.unit->segment->length,
                     item.low);
      barrier.wait(count);
    }
    for (const Item& item : items) {
      const Segment& s = *item.unit->segment;
      const Pair& pair = c.pair(s, item.output);
      share(expand_total, thread, count, item.expand_first, pair.rank,
            ceil_div(c.p.output[item.output].d_out, kPanel), &first, &last);
      if (first < last)
        expand(c, item.unit->config, s, item.output, s.start, s.length, item.low, first, last);
    }
  };
  run_on(threads, work);
}

Shape shape_of(const Problem& p, const Segment& s, const SegmentList& segments) {
  Shape shape{Operation::kApply, p.dtype, s.length, p.d_in, 0, 0, segments.size()};
  for (int o = 0; o < p.outputs; ++o) {
    shape.d_out += p.output[o].d_out;
    shape.rank = std::max<int64_t>(shape.rank, p.pairs[int64_t(s.slot) * p.outputs + o].rank);
  }
  return shape;
}

}  // namespace

void apply(const Kernels& kernels, const Problem& p, const SegmentList& segments,
           const Chooser& chooser, int threads) {
  const Call c{kernels, p, chooser.one_order()};
  thread_local std::vector<Unit> kept;
  std::vector<Unit>& units = kept;  // workers must see this thread's, not their own
  for (int wave = 0; wave < segments.waves(); ++wave) {
    units.clear();
    int64_t rows = 0, blocks = 0;
    double flops = 0, bytes = 0;
    Shape last{};
    for (const Segment* s = segments.begin(wave); s != segments.end(wave); ++s) {
      const Shape shape = shape_of(p, *s, segments);
      if (shape.rank == 0) continue;
      const bool same = !units.empty() && last.rows == shape.rows && last.rank == shape.rank;
      units.push_back({s, same ? units.back().config : chooser.choose(shape), 0, 0});
      last = shape;
      rows += s->length;
      const double elements = double(shape.rank) * double(p.d_in * p.outputs + shape.d_out);
      flops += 2 * double(s->length) * elements;
      bytes += elements * double(size_of(p.dtype));
    }
    if (units.empty()) continue;
    int used = std::max(flops / kFlopRate, bytes / kByteRate) > kWorthThreads ? threads : 1;
    for (Unit& unit : units) {
      int64_t block = std::max<int64_t>(1, unit.config.row_block);
      // Two blocks a thread at least, but none so small that its panels are read for few rows.
      if (used > 1) block = std::min(block, std::max<int64_t>(16, ceil_div(rows, 2 * used)));
      unit.blocks = ceil_div(unit.segment->length, block);
      unit.first_block = blocks;
      blocks += unit.blocks;
    }
    if (used > 1 && blocks < 2 * used && rows <= 16 * used) {
      split_wave(c, units, used);
      continue;
    }
    std::atomic<int64_t> taken{0};
    auto work = [&](int, int) {
      size_t at = 0;
      for (int64_t block; (block = taken.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
        while (block >= units[at].first_block + units[at].blocks) ++at;
        const Unit& unit = units[at];
        const int64_t i = block - unit.first_block, length = unit.segment->length;
        const int64_t first = length * i / unit.blocks;
        whole_block(c, unit.config, *unit.segment, unit.segment->start + first,
                    length * (i + 1) / unit.blocks - first);
      }
    };
    run_on(int(std::min<int64_t>(used, blocks)), work);
  }
}

void heads(const Kernels& kernels, const Problem& p, const SegmentList& segments) {
  const Call c{kernels, p, true};
  const TileConfig config{int32_t(kFewRows), 64, 64, 0, 24, false, 0};
  for (int wave = 0; wave < segments.waves(); ++wave)
    for (const Segment* s = segments.begin(wave); s != segments.end(wave); ++s) {
      const Pair& pair = c.pair(*s, 0);
      for (int64_t row = 0; row < s->length; row += kFewRows) {
        const int64_t rows = std::min(kFewRows, s->length - row);
        float* low = rank_scratch.get(rank_blocks(pair) * rows * kRowStride);
        over_depth(c, config, s->start + row, rows, [&](const Rows& x, int64_t k, int64_t count) {
          shrink(c, config, pair, rows, x, k, count, low, 0, panels_of(pair), k == 0);
        });
        const float* bias = static_cast<const float*>(pair.b);
        for (int64_t i = 0; i < rows; ++i) {
          float* y = static_cast<float*>(p.y) + (s->start + row + i) * p.y_stride;
          for (int64_t n = 0; n < pair.rank; ++n)
            y[n] = low[(n / kRankBlock * rows + i) * kRowStride + n % kRankBlock] + bias[n];
        }
      }
    }
}

namespace {

// Columns [first, first + columns) of one matrix: A's columns packed once, all rows past them.
void merge_columns(const Kernels& kernels, Dtype dtype, char* out, const char* in, const Merge& m,
                   float sign, const TileConfig& config, int64_t first, int64_t columns) {
  const ptrdiff_t size = ptrdiff_t(size_of(dtype));
  const int64_t panels = ceil_div(columns, kPanel);
  float* packed = rank_scratch.get(panels * m.rank * kPanel);
  for (int64_t panel = 0; panel < panels; ++panel) {
    float* to = packed + panel * m.rank * kPanel;
    const int64_t at = first + panel * kPanel, count = std::min<int64_t>(kPanel, m.d_in - at);
    for (int64_t r = 0; r < m.rank; ++r, to += kPanel)
      for (int64_t i = 0; i < kPanel; ++i) to[i] = i < count ? m.a[r * m.d_in + at + i] : 0;
  }
  // Whole cache lines only. In place, what was read is in cache and is written there.
  const bool streaming = in != out && reinterpret_cast<uintptr_t>(out + m.offset * size) % 64 == 0 &&
                         m.d_in * size % 64 == 0;
  const int64_t block = std::max(1, config.row_block);
  for (int64_t row = 0; row < m.d_out; row += block) {
    const int64_t at = m.offset + row * m.d_in + first;
    Tile t{};
    t.x = m.b + row * m.rank;
    t.x_stride = m.rank;
    t.panels = reinterpret_cast<const char*>(packed);
    t.panel_bytes = m.rank * kPanel * 4;
    t.steps = m.rank;
    t.out = out + at * size;
    t.in = in + at * size;
    t.out_stride = t.in_stride = m.d_in;
    t.sign = sign;
    Walk w{};
    w.kernels = (streaming ? kernels.merge_streaming : kernels.merge)[int(dtype)];
    w.max_rows = kernels.max_rows;
    w.most_rows = int(kFewRows);
    w.rows = std::min(block, m.d_out - row);
    w.panels = panels;
    w.columns = std::max(1, config.expand_columns / kPanel);
    w.out_row = w.in_row = m.d_in * size;
    w.out_panel = w.in_panel = kPanel * size;
    w.tail = int32_t(std::min<int64_t>(kPanel, columns - (panels - 1) * kPanel));
    walk(w, t);
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

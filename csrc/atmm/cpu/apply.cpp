// The operator: segments are cut into blocks of rows, and those shared out among threads.
#include <deque>
#include <optional>
#include <vector>

#include "atmm/operator.h"
#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "products.h"
#include "split.h"

namespace vlora::atmm {
namespace {

constexpr double kWorthThreads = 8e-6;
// Seconds of work below which waking a second thread costs more than it brings.
constexpr double kHot = 3;
// How much faster than memory adapters in cache are read, for estimates of work alone.
constexpr int64_t kLeastBlock = 8;
// Rows of a block that is cut for balance: a decoding step of 16 rows is two, whose tiles of 4 rows still
// fill the pipeline.
constexpr double kBalanced = 1.08;
// The longest thread's share over the mean from which on it is worth cutting finer.
constexpr int kMostCuts = 5;
constexpr int64_t kSplitRows = 24;
// Rows a thread up to which a wave that cannot be balanced by blocks is split inside its segments.

float* low_scratch(int64_t floats) {
  thread_local runtime::Scratch scratch;
  return scratch.get(floats);
}

// Both products of a block of rows, all outputs, back to back.
void whole_block(const Call& c, const TileConfig& config, const Segment& s, int64_t row,
                 int64_t rows) {
  float* low[kMaxOutputs];
  int64_t floats = 0;
  for (int o = 0; o < c.p.outputs; ++o) floats += low_floats(c.pair(s, o), rows);
  float* next = low_scratch(floats);
  for (int o = 0; o < c.p.outputs; ++o) {
    low[o] = next;
    next += low_floats(c.pair(s, o), rows);
  }
  over_depth(c, config, row, rows, 0, c.p.d_in, [&](const Rows& x) {
    for (int o = 0; o < c.p.outputs; ++o) {
      const Pair& pair = c.pair(s, o);
      if (pair.rank) shrink(c, config, pair, rows, x, low[o]);
    }
  });
  for (int o = 0; o < c.p.outputs; ++o) {
    const Pair& pair = c.pair(s, o);
    if (!pair.rank) continue;
    finish_low(c, pair, rows, low[o]);
    expand(c, config, s, o, row, rows, low[o], 0, c.b(pair, o).count);
  }
}

// The longest of the threads' shares, if each takes the next block when it is free.
double longest_share(const std::vector<Unit>& units, int threads) {
  thread_local std::vector<double> kept;
  std::vector<double>& busy = kept;
  busy.assign(size_t(threads), 0);
  for (const Unit& unit : units)
    for (int64_t i = 0; i < unit.blocks; ++i)
      *std::min_element(busy.begin(), busy.end()) += unit.block_seconds();
  return *std::max_element(busy.begin(), busy.end());
}

// Cuts and orders the blocks so that the threads' shares are even: false if they cannot be.
bool balance(std::vector<Unit>& units, int threads, double seconds) {
  const double enough = kBalanced * seconds / threads;
  for (int cut = 0;; ++cut) {
    // Large blocks first: the small ones fill what is left.
    std::sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) {
      const double first = a.block_seconds(), second = b.block_seconds();
      return first != second ? first > second : a.segment < b.segment;
    });
    int64_t blocks = 0;
    for (const Unit& unit : units) blocks += unit.blocks;
    if (blocks > 32 * threads || longest_share(units, threads) <= enough) return true;
    if (cut == kMostCuts) return false;
    const double largest = units.front().block_seconds();
    bool finer = false;
    for (Unit& unit : units) {
      if (unit.block_seconds() < 0.6 * largest) break;
      if (unit.segment->length >= 2 * kLeastBlock * unit.blocks) {
        unit.blocks *= 2;
        finer = true;
      }
    }
    if (!finer) return false;
  }
}

Shape shape_of(const Call& c, const Segment& s, const SegmentList& segments, int threads) {
  Shape shape{Operation::kApply, c.p.dtype, s.length, c.p.d_in, 0, 0, segments.size(), threads};
  for (int o = 0; o < c.p.outputs; ++o) {
    shape.d_out += c.p.output[o].d_out;
    shape.rank = std::max<int64_t>(shape.rank, c.pair(s, o).rank);
  }
  return shape;
}

double seconds_of(const Call& c, const Segment& s) {
  double elements = 0, columns = double(c.p.d_in);  // of the adapter; of rows, y's read and written
  for (int o = 0; o < c.p.outputs; ++o)
    if (const int32_t rank = c.pair(s, o).rank) {
      elements += double(rank) * double(c.p.d_in + c.p.output[o].d_out);
      columns += 2 * double(c.p.output[o].d_out);
    }
  const runtime::Machine& machine = runtime::machine();
  const double rate = kHot * machine.memory, rows = double(s.length);
  const double moved =
      elements * double(size_of(c.p.dtype)) + rows * columns * double(size_of(c.p.rows_dtype));
  return std::max(2 * rows * elements / machine.peak[int(c.p.dtype)], moved / rate);
}

// Whether vdpbf16ps, for all that it does at once, is no faster than fp32's multiply-adds: then some rows wait
// for it and not for memory. One row does not; from kTileUnitRows on there are other ways.
bool pairs_are_slow() {
  static const bool slow = !runtime::runs_here(runtime::Isa::kAvx512Bf16) ||
                           runtime::core_peak(runtime::Isa::kAvx512Bf16, Dtype::kBf16) <
                               runtime::core_peak(runtime::Isa::kAvx512, Dtype::kFp32);
  return slow;
}

// Blocks of rows in the order in which they are taken. few: of 2 … kTileUnitRows - 1 rows, or null.
void blocks_of(const Call& c, const Call* few, const std::vector<Unit>& units, runtime::Pieces& pieces) {
  size_t at = 0;
  for (int64_t block; (block = pieces.take()) >= 0;) {
    while (block >= units[at].first_block + units[at].blocks) ++at;
    const Unit& unit = units[at];
    const int64_t i = block - unit.first_block, length = unit.segment->length;
    const int64_t first = length * i / unit.blocks, rows = length * (i + 1) / unit.blocks - first;
    const bool by_few = few && rows > 1 && rows < kTileUnitRows;
    whole_block(by_few ? *few : c, unit.config, *unit.segment, unit.segment->start + first, rows);
  }
}

}  // namespace

// Segments that can run side by side: shared out by blocks of rows, or inside the segments.
struct Apply::Wave {
  std::vector<Unit> units;
  int threads = 1;  // worth it
  std::optional<runtime::Pieces> blocks;
  std::optional<Split> split;

  void plan(const Call& c, int most_threads) {
    double seconds = 0;
    int64_t rows = 0, count = 0;
    for (Unit& unit : units) {
      unit.blocks = ceil_div(unit.segment->length, std::max(1, unit.config.row_block));
      seconds += unit.seconds;
      rows += unit.segment->length;
    }
    threads = seconds < kWorthThreads ? 1 : most_threads;
    if (threads > 1 && !balance(units, threads, seconds) && rows <= kSplitRows * threads) {
      split.emplace(c, units, threads);
      return;
    }
    for (Unit& unit : units) {
      unit.first_block = count;
      count += unit.blocks;
    }
    threads = int(std::min<int64_t>(threads, count));
    blocks.emplace(count);
  }
};

struct Apply::Plan {
  Call call;
  std::optional<Call> few;
  std::deque<Wave> waves;
};

Apply::Apply(const Kernels& kernels, const Problem& p, const SegmentList& segments,
             const Chooser& chooser, int threads)
    : plan_(new Plan{{kernels, p, chooser.one_order()}, {}, {}}) {
  const Call& c = plan_->call;
  if (kernels.few && p.dtype == Dtype::kBf16 && !c.one_order && pairs_are_slow())
    plan_->few.emplace(Call{*kernels.few, p, false});
  int64_t floats = 0;
  for (int i = 0; i < segments.waves(); ++i) {
    std::vector<Unit> units;
    Shape last{};
    for (const Segment* s = segments.begin(i); s != segments.end(i); ++s) {
      const Shape shape = shape_of(c, *s, segments, threads);
      if (shape.rank == 0) continue;
      const bool same = !units.empty() && last.rows == shape.rows && last.rank == shape.rank;
      units.push_back({s, same ? units.back().config : chooser.choose(shape), seconds_of(c, *s)});
      last = shape;
    }
    if (units.empty()) continue;
    Wave& wave = plan_->waves.emplace_back();
    wave.units = std::move(units);
    wave.plan(c, threads);
    threads_ = std::max(threads_, wave.threads);
    meets_ = meets_ || wave.split || plan_->waves.size() > 1;
    if (wave.split) floats = std::max(floats, wave.split->floats());
  }
  thread_local runtime::Scratch kept;
  float* const memory = floats ? kept.get(floats) : nullptr;
  for (Wave& wave : plan_->waves)
    if (wave.split) wave.split->use(memory);
}

Apply::~Apply() = default;

void Apply::operator()(const runtime::Team& team) const {
  bool first = true;
  for (Wave& wave : plan_->waves) {
    if (!first) team.wait();
    first = false;
    if (wave.split)
      (*wave.split)(team);
    else
      blocks_of(plan_->call, plan_->few ? &*plan_->few : nullptr, wave.units, *wave.blocks);
  }
  if (const runtime::TileUnit* unit = plan_->call.kernels.tiles) unit->release();
}

void apply(const Kernels& kernels, const Problem& p, const SegmentList& segments,
           const Chooser& chooser, int threads) {
  const Apply plan(kernels, p, segments, chooser, threads);
  runtime::run_region(
      plan.threads(), !plan.meets(),
      [](void* context, const runtime::Team& team) { (*static_cast<const Apply*>(context))(team); },
      const_cast<Apply*>(&plan));
}

void heads(const Kernels& kernels, const Problem& p, const SegmentList& segments) {
  const Call c{kernels, p, true};
  const TileConfig config{int32_t(kFewRows), 64, 64, 0, 24, false, 0};
  for (int wave = 0; wave < segments.waves(); ++wave)
    for (const Segment* s = segments.begin(wave); s != segments.end(wave); ++s) {
      const Pair& pair = c.pair(*s, 0);
      for (int64_t row = 0; row < s->length; row += kFewRows) {
        const int64_t rows = std::min(kFewRows, s->length - row);
        float* low = low_scratch(low_floats(pair, rows));
        over_depth(c, config, s->start + row, rows, 0, p.d_in, [&](const Rows& x) {
          shrink(c, config, pair, rows, x, low);
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

}  // namespace vlora::atmm

// The operator: divides segments into blocks of rows and distributes the blocks over threads.
#include <deque>
#include <optional>
#include <vector>

#include "atmm/operator.h"
#include "products.h"
#include "runtime/machine.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "shared_wave.h"

namespace vlora::atmm {
namespace {

// Minimum seconds of work that repay a second thread; waking it takes time.
constexpr double kMinParallelSeconds = 8e-6;

// Assumed ratio of the rates of reading adapters from cache and from memory, for estimates of work.
constexpr double kCachedRate = 3;

// Minimum rows of a block that is halved for balance. A decode step of 16 rows then has two blocks,
// whose tiles of 4 rows still fill the pipeline.
constexpr int64_t kMinBlockRows = 8;

// Maximum ratio of the longest thread's share to the mean share at which shares count as balanced.
constexpr double kBalanced = 1.08;

// Maximum number of times that blocks are halved for balance.
constexpr int kMaxHalvings = 5;

// Maximum number of blocks per thread for which the balance is computed. More blocks are balanced.
constexpr int64_t kManyBlocks = 32;

// Maximum rows per thread for which all threads work on each segment together (SharedWave) if
// blocks of rows cannot be balanced.
constexpr int64_t kMaxSharedRows = 24;

float* low_scratch(int64_t floats) {
  thread_local runtime::Scratch scratch;
  return scratch.get(floats);
}

// Computes both products of a block of rows for all outputs.
void apply_block(const Call& c, const TileConfig& config, const Segment& s, int64_t row,
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

// Returns the longest thread's share in seconds if each thread that is free takes the next block.
double longest_share(const std::vector<SegmentWork>& segments, int threads) {
  thread_local std::vector<double> reused;
  std::vector<double>& busy = reused;
  busy.assign(size_t(threads), 0);
  for (const SegmentWork& work : segments)
    for (int64_t i = 0; i < work.blocks; ++i)
      *std::min_element(busy.begin(), busy.end()) += work.block_seconds();
  return *std::max_element(busy.begin(), busy.end());
}

// Divides and orders the blocks so that the shares of the threads are balanced. Returns false if
// that is impossible.
bool balance(std::vector<SegmentWork>& segments, int threads, double seconds) {
  const double limit = kBalanced * seconds / threads;
  for (int halvings = 0;; ++halvings) {
    // Large blocks come first, so that small ones fill the gaps at the end.
    std::sort(segments.begin(), segments.end(), [](const SegmentWork& a, const SegmentWork& b) {
      const double first = a.block_seconds(), second = b.block_seconds();
      return first != second ? first > second : a.segment < b.segment;
    });
    int64_t blocks = 0;
    for (const SegmentWork& work : segments) blocks += work.blocks;
    if (blocks > kManyBlocks * threads || longest_share(segments, threads) <= limit) return true;
    if (halvings == kMaxHalvings) return false;
    const double largest = segments.front().block_seconds();
    bool halved = false;
    for (SegmentWork& work : segments) {
      if (work.block_seconds() < 0.6 * largest) break;
      if (work.segment->length >= 2 * kMinBlockRows * work.blocks) {
        work.blocks *= 2;
        halved = true;
      }
    }
    if (!halved) return false;
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

// Estimates the seconds that a segment takes on one thread: the larger of the times for computing
// and for moving data.
double estimated_seconds(const Call& c, const Segment& s) {
  double adapter_elements = 0;
  double columns = double(c.p.d_in);  // elements moved per row; those of y are read and written
  for (int o = 0; o < c.p.outputs; ++o)
    if (const int32_t rank = c.pair(s, o).rank) {
      adapter_elements += double(rank) * double(c.p.d_in + c.p.output[o].d_out);
      columns += 2 * double(c.p.output[o].d_out);
    }
  const runtime::Machine& machine = runtime::machine();
  const double rate = kCachedRate * machine.memory, rows = double(s.length);
  const double bytes = adapter_elements * double(size_of(c.p.dtype)) +
                       rows * columns * double(size_of(c.p.rows_dtype));
  return std::max(2 * rows * adapter_elements / machine.peak[int(c.p.dtype)], bytes / rate);
}

// Whether vdpbf16ps is missing or slower than fp32 multiply-adds. It would then limit blocks of a
// few rows, so they are multiplied as fp32. A single row is limited by memory, and kMinTileUnitRows
// or more rows use other kernels.
bool pairs_are_slow() {
  static const bool slow = !runtime::runs_here(runtime::Isa::kAvx512Bf16) ||
                           runtime::core_peak(runtime::Isa::kAvx512Bf16, Dtype::kBf16) <
                               runtime::core_peak(runtime::Isa::kAvx512, Dtype::kFp32);
  return slow;
}

// Computes blocks of rows until all are done. small: the call for blocks of 2 to kMinTileUnitRows -
// 1 rows, or null if they use the same kernels.
void apply_blocks(const Call& c, const Call* small, const std::vector<SegmentWork>& segments,
                  runtime::Pieces& pieces) {
  size_t i = 0;
  for (int64_t block; (block = pieces.take()) >= 0;) {
    while (block >= segments[i].first_block + segments[i].blocks) ++i;
    const SegmentWork& work = segments[i];
    const int64_t index = block - work.first_block, length = work.segment->length;
    const int64_t first = length * index / work.blocks;
    const int64_t rows = length * (index + 1) / work.blocks - first;
    const bool is_small = small && rows > 1 && rows < kMinTileUnitRows;
    apply_block(is_small ? *small : c, work.config, *work.segment, work.segment->start + first,
                rows);
  }
}

// Segments that can run concurrently. Threads share them by blocks of rows, or inside each segment.
struct Wave {
  std::vector<SegmentWork> segments;
  int threads = 1;  // maximum number of threads that its work repays
  std::optional<runtime::Pieces> blocks;
  std::optional<SharedWave> shared;

  void plan(const Call& c, int max_threads) {
    double seconds = 0;
    int64_t rows = 0, count = 0;
    for (SegmentWork& work : segments) {
      work.blocks = ceil_div(work.segment->length, std::max(1, work.config.row_block));
      seconds += work.seconds;
      rows += work.segment->length;
    }
    threads = seconds < kMinParallelSeconds ? 1 : max_threads;
    if (threads > 1 && !balance(segments, threads, seconds) && rows <= kMaxSharedRows * threads) {
      shared.emplace(c, segments, threads);
      return;
    }
    for (SegmentWork& work : segments) {
      work.first_block = count;
      count += work.blocks;
    }
    threads = int(std::min<int64_t>(threads, count));
    blocks.emplace(count);
  }
};

// A call of the operator, whose segments have been distributed over threads. Each thread of a
// region calls the object once.
class Plan {
 public:
  // threads: maximum number of threads.
  Plan(const Kernels& kernels, const Problem& p, const SegmentList& segments,
       const Chooser& chooser, int threads)
      : call_{kernels, p, chooser.fixed_order()} {
    if (kernels.small_blocks && p.dtype == Dtype::kBf16 && !call_.fixed_order && pairs_are_slow())
      small_blocks_.emplace(Call{*kernels.small_blocks, p, false});
    int64_t floats = 0;
    for (int i = 0; i < segments.waves(); ++i) {
      std::vector<SegmentWork> work;
      Shape previous{};
      for (const Segment* s = segments.begin(i); s != segments.end(i); ++s) {
        const Shape shape = shape_of(call_, *s, segments, threads);
        if (shape.rank == 0) continue;
        const bool same =
            !work.empty() && previous.rows == shape.rows && previous.rank == shape.rank;
        work.push_back({s, same ? work.back().config : chooser.choose(shape),
                        estimated_seconds(call_, *s), 0, 0});
        previous = shape;
      }
      if (work.empty()) continue;
      Wave& wave = waves_.emplace_back();
      wave.segments = std::move(work);
      wave.plan(call_, threads);
      threads_ = std::max(threads_, wave.threads);
      has_barriers_ = has_barriers_ || wave.shared || waves_.size() > 1;
      if (wave.shared) floats = std::max(floats, wave.shared->floats());
    }
    thread_local runtime::Scratch scratch;
    float* const memory = floats ? scratch.get(floats) : nullptr;
    for (Wave& wave : waves_)
      if (wave.shared) wave.shared->use(memory);
  }

  void operator()(const runtime::Team& team) {
    bool first = true;
    for (Wave& wave : waves_) {
      if (!first) team.wait();
      first = false;
      if (wave.shared)
        (*wave.shared)(team);
      else
        apply_blocks(call_, small_blocks_ ? &*small_blocks_ : nullptr, wave.segments, *wave.blocks);
    }
  }

  int threads() const { return threads_; }             // number of threads for which it has work
  bool has_barriers() const { return has_barriers_; }  // whether its threads wait for each other

 private:
  Call call_;
  std::optional<Call> small_blocks_;
  std::deque<Wave> waves_;
  int threads_ = 1;
  bool has_barriers_ = false;
};

}  // namespace

void apply(const Kernels& kernels, const Problem& p, const SegmentList& segments,
           const Chooser& chooser, int threads) {
  Plan plan(kernels, p, segments, chooser, threads);
  runtime::run_region(
      plan.threads(), !plan.has_barriers(),
      [](void* context, const runtime::Team& team) { (*static_cast<Plan*>(context))(team); },
      &plan);
}

void heads(const Kernels& kernels, const Problem& p, const SegmentList& segments) {
  const Call c{kernels, p, true};
  const TileConfig config{int32_t(kMaxDirectRows), 64, 64, 0, 24, 0};
  for (int wave = 0; wave < segments.waves(); ++wave)
    for (const Segment* s = segments.begin(wave); s != segments.end(wave); ++s) {
      const Pair& pair = c.pair(*s, 0);
      for (int64_t row = 0; row < s->length; row += kMaxDirectRows) {
        const int64_t rows = std::min(kMaxDirectRows, s->length - row);
        float* low = low_scratch(low_floats(pair, rows));
        over_depth(c, config, s->start + row, rows, 0, p.d_in,
                   [&](const Rows& x) { shrink(c, config, pair, rows, x, low); });
        const float* bias = static_cast<const float*>(pair.b);
        for (int64_t i = 0; i < rows; ++i) {
          float* y = static_cast<float*>(p.y) + (s->start + row + i) * p.y_stride;
          for (int64_t n = 0; n < pair.rank; ++n)
            y[n] = low[(n / kRankBlock * rows + i) * kScratchStride + n % kRankBlock] + bias[n];
        }
      }
    }
}

}  // namespace vlora::atmm

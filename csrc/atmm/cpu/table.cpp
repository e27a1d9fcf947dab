#include "atmm/table.h"

#include "walk.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>

namespace vlora::atmm {
namespace {

uint64_t bucket(int64_t value, int least, int most) {
  int power = least;
  while (power < most && (int64_t(1) << power) < value) ++power;
  return uint64_t(power);
}

int field(uint64_t word, int at) { return int(word >> (8 * at) & 0xff); }

int log2_of(uint64_t value) { return value ? 63 - __builtin_clzll(value) : 0; }

constexpr int64_t kFetchesRows = 2 << 20;
// L2 of cores that need not be asked for the rows that a merge reads next.

// Octaves apart. Rows and rank decide between streaming and blocking, so they weigh most; a table
// of another operation or type says nothing.
int distance(const Key& a, const Key& b) {
  if ((a.low ^ b.low) & 0xffff) return -1;
  const auto size = [](const Key& key, int shift) {
    return log2_of(key.high >> shift & 0xffffffffu);
  };
  return 8 * std::abs(field(a.low, 2) - field(b.low, 2)) +
         8 * std::abs(field(a.low, 3) - field(b.low, 3)) +
         std::abs(field(a.low, 4) - field(b.low, 4)) + std::abs(field(a.low, 5) - field(b.low, 5)) +
         4 * std::abs(size(a, 0) - size(b, 0)) + 4 * std::abs(size(a, 32) - size(b, 32));
}

// Of some numbers, ascending, the largest that is not above `wanted` by more than a quarter.
int nearest(std::initializer_list<int> numbers, double wanted) {
  int best = *numbers.begin();
  for (const int number : numbers)
    if (number <= 1.25 * wanted) best = number;
  return best;
}

const std::vector<TileConfig>& all_of(Operation operation) {
  static const std::vector<TileConfig> apply = {
#include "configurations.inc"
  };
  static const std::vector<TileConfig> merge = {
#include "merge_configurations.inc"
  };
  return operation == Operation::kApply ? apply : merge;
}

}  // namespace

Key key_of(const Shape& s) {
  return {uint64_t(s.operation) | uint64_t(s.dtype) << 8 | bucket(s.rows, 0, 13) << 16 |
              bucket(s.rank, 3, 10) << 24 | bucket(s.segments, 0, 5) << 32 |
              bucket(s.threads, 0, 6) << kThreadsShift,
          uint64_t(uint32_t(s.d_in)) | uint64_t(uint32_t(s.d_out)) << 32};
}

const std::vector<TileConfig>& configurations(Operation operation) { return all_of(operation); }

std::string name_of(const TileConfig& c) {
  const auto number = [](int32_t value) { return std::to_string(value); };
  if (c.column_block)
    return "merge-n" + number(c.expand_columns) + "-c" + number(c.column_block) + "-p" + number(c.prefetch);
  return "r" + number(c.row_block) + "-s" + number(c.shrink_columns) + "-e" +
         number(c.expand_columns) + "-d" + number(c.depth_block) + "-p" + number(c.prefetch) +
         (c.pack_rows ? "-packed" : "");
}

TileConfig built_in(const Shape& s, const runtime::Machine& machine, bool widening, bool tiles) {
  // All panels of a bundle: they lie in one stream. (A tile is never wider than its instruction set's
  // widest.)
  const int columns = kMaxBundle * kPanel;
  if (s.operation == Operation::kMerge) {
    // Columns of A packed at a time: as many as fill L2, though nothing is left for W. Rows of W are
    // then streamed in long pieces, which is worth more (1 MiB of L2, rank 64: 0.85 of the limit with
    // 4096 columns, 0.77 with 1024). One tile of W ahead. Cores with 2 MiB of L2 fetch rows of W into it by
    // themselves: asked for, these take 2 to 6 % longer (rank 64, bf16), and A leaves them three quarters.
    const bool fetches = machine.l2 >= kFetchesRows;
    const double a = double(fetches ? machine.l2 / 4 : machine.l2);
    const int block = nearest({1024, 2048, 4096}, a / double(4 * std::max<int64_t>(16, s.rank)));
    return {8, 0, columns, 0, fetches ? 0 : kMaxBundle, true, block};
  }
  // Adapters are read once and nothing is used twice. Fetched ahead: what a memory latency of 100 ns
  // holds at the rate of one core.
  if (s.rows <= 8) {
    const int lines = nearest({24, 64, 128}, machine.memory * kLatency / 64);
    return {8, columns, columns, 0, lines, false, 0};
  }
  // Wide tiles: 6 rows by 64 columns fill AVX-512's registers and load least per product (16
  // columns with AVX2's). Rows are read in place: copying them costs more than their stride does
  // (160 against 195 GFLOP/s at d = 4096, rank 64). Panels of 64 columns take a quarter of L2 at a
  // time, a rank-64 intermediate three quarters of L1; where panels are made fp32 for a block of rows,
  // blocks are twice as long.
  const int depth = nearest({128, 256, 512, 1024}, double(machine.l2) / 4 / (columns * 4));
  const double rows = double(machine.l1) * 3 / 4 / (64 * 4);
  // A unit that multiplies tiles waits for its rows: where a segment's fill half of L2, few at a time, as
  // many streams as the machine's own prefetching follows and as one product takes (one thread, 4 x 256 rows,
  // d = 4096, rank 64: 96 rows 2.4 ms, 48 2.3, 24 1.9, 32 1.8).
  const int64_t moved = 2 * s.rows * (s.d_in + s.d_out);
  if (tiles && 2 * moved >= machine.l2) return {32, columns, columns, depth, 0, false, 0};
  return {nearest({48, 96, 192}, widening ? 2 * rows : rows), columns, columns, depth, 0, false, 0};
}

TileConfig built_in(const Shape& shape) {
  const Kernels& here = kernels(runtime::isa(shape.dtype));
  const bool bf16 = shape.dtype == Dtype::kBf16;
  return built_in(shape, runtime::machine(), bf16 && !here.pairs_in_registers, bf16 && here.tiles);
}

TileTable::TileTable(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    const auto& all = all_of(Operation(entry.key.low & 0xff));
    const auto found = std::find_if(all.begin(), all.end(), [&](const TileConfig& config) {
      return name_of(config) == entry.config;
    });
    if (found == all.end())
      throw std::invalid_argument("tile table: no configuration is named '" + entry.config + "'");
    entries_[entry.key] = &*found;
  }
}

const TileConfig* TileTable::find(const Key& key, bool* exact) const {
  auto found = entries_.find(key);
  *exact = found != entries_.end();
  if (*exact) return found->second;
  // Of another number of threads, before all others are looked at.
  for (Key fewer = key; fewer.threads() > 0;) {
    fewer.low -= uint64_t(1) << kThreadsShift;
    found = entries_.find(fewer);
    if (found != entries_.end()) return found->second;
  }
  return nearest_to(key);
}

const TileConfig* TileTable::nearest_to(const Key& key) const {
  // A thread's misses repeat from layer to layer: the last few are kept.
  struct Kept {
    const TileTable* table;
    Key key;
    const TileConfig* config;
  };
  thread_local Kept kept[16] = {};
  Kept& slot = kept[KeyHash{}(key) % 16];
  if (slot.table == this && slot.key == key) return slot.config;
  const TileConfig* best = nullptr;
  int least = -1;
  for (const auto& [other, config] : entries_) {
    const int apart = distance(key, other);
    if (apart >= 0 && (least < 0 || apart < least)) {
      least = apart;
      best = config;
    }
  }
  slot = {this, key, best};
  return best;
}

}  // namespace vlora::atmm

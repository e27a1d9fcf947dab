// Choice of tiles: keys, tables and the built-in configuration.
#include "atmm/table.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>

#include "tile_loop.h"

namespace vlora::atmm {
namespace {

// Returns the exponent, within [min, max], of the smallest power of two that is at least `value`.
uint64_t bucket(int64_t value, int min, int max) {
  int power = min;
  while (power < max && (int64_t(1) << power) < value) ++power;
  return uint64_t(power);
}

int field(uint64_t word, int index) { return int(word >> (8 * index) & 0xff); }

int log2_of(uint64_t value) { return value ? 63 - __builtin_clzll(value) : 0; }

// Minimum L2 bytes of cores whose hardware prefetches the rows that a merge reads next.
constexpr int64_t kPrefetchingL2 = 2 << 20;

// Returns the weighted distance of two keys in octaves, or -1 if their operation or type differs.
// Rows and rank have the largest weight, because they decide between streaming and blocking.
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

// Returns the largest of some ascending numbers that is at most 1.25 * target, or the first number
// if all are larger.
int nearest(std::initializer_list<int> numbers, double target) {
  int best = *numbers.begin();
  for (const int number : numbers)
    if (number <= 1.25 * target) best = number;
  return best;
}

}  // namespace

Key key_of(const Shape& s) {
  return {uint64_t(s.operation) | uint64_t(s.dtype) << 8 | bucket(s.rows, 0, 13) << 16 |
              bucket(s.rank, 3, 10) << 24 | bucket(s.segments, 0, 5) << 32 |
              bucket(s.threads, 0, 6) << kThreadsShift,
          uint64_t(uint32_t(s.d_in)) | uint64_t(uint32_t(s.d_out)) << 32};
}

const std::vector<TileConfig>& configurations(Operation operation) {
  // They are never deleted, because threads may use them during exit.
  static const auto& apply = *new std::vector<TileConfig>{
#include "configurations.inc"
  };
  static const auto& merge = *new std::vector<TileConfig>{
#include "merge_configurations.inc"
  };
  return operation == Operation::kApply ? apply : merge;
}

std::string name_of(const TileConfig& c) {
  const auto number = [](int32_t value) { return std::to_string(value); };
  if (c.column_block)
    return "merge-n" + number(c.expand_columns) + "-c" + number(c.column_block) + "-p" +
           number(c.prefetch);
  return "r" + number(c.row_block) + "-s" + number(c.shrink_columns) + "-e" +
         number(c.expand_columns) + "-d" + number(c.depth_block) + "-p" + number(c.prefetch);
}

TileConfig built_in(const Shape& s, const runtime::Machine& machine, bool widening, bool tiles) {
  // All panels of a bundle, because they form one stream. (A register tile is at most as wide as
  // the widest tile of its instruction set.)
  const int columns = kMaxBundle * kPanel;
  if (s.operation == Operation::kMerge) {
    // So many columns of A are packed at a time that they fill L2, although that leaves no L2 for
    // W: rows of W are then read in long pieces, which gains more. With 1 MiB of L2 and rank 64,
    // 4096 columns reach 0.85 of the memory limit, and 1024 columns 0.77. One tile of W is
    // prefetched. Cores with 2 MiB of L2 prefetch rows of W themselves. Software prefetch makes
    // them 2 to 6 % slower (rank 64, bf16), and A takes only a quarter of their L2.
    const bool hardware_prefetch = machine.l2 >= kPrefetchingL2;
    const double a_bytes = double(hardware_prefetch ? machine.l2 / 4 : machine.l2);
    const double column_bytes = double(4 * std::max<int64_t>(16, s.rank));
    const int block = nearest({1024, 2048, 4096}, a_bytes / column_bytes);
    return {8, 0, columns, 0, hardware_prefetch ? 0 : kMaxBundle, block};
  }
  // Few rows: adapters are read once, without reuse. The prefetch distance is the amount that one
  // core reads from memory during a latency of 100 ns.
  if (s.rows <= 8) {
    const int lines = nearest({24, 64, 128}, machine.memory * kLatency / 64);
    return {8, columns, columns, 0, lines, 0};
  }
  // Many rows: wide tiles. 6 rows by 64 columns (16 columns with AVX2) fill the registers and need
  // the fewest loads per product. Rows are read in place: copying them costs more than the cache
  // misses of their stride (160 against 195 GFLOP/s at d = 4096, rank 64). Panels of 64 columns
  // take a quarter of L2 at a time. A rank-64 intermediate takes three quarters of L1. If panels
  // are converted to fp32 for a block of rows, blocks are twice as long.
  const int depth = nearest({128, 256, 512, 1024}, double(machine.l2) / 4 / (columns * 4));
  const double rows = double(machine.l1) * 3 / 4 / (64 * 4);
  // Loading rows limits AMX tiles. If a segment's rows fill half of L2, blocks have 32 rows: those
  // of one product, and as many streams as the hardware prefetches. Measured on one thread with 4 x
  // 256 rows, d = 4096, rank 64: 96 rows 2.4 ms, 48 rows 2.3 ms, 24 rows 1.9 ms, 32 rows 1.8 ms.
  const int64_t row_bytes = 2 * s.rows * (s.d_in + s.d_out);
  if (tiles && 2 * row_bytes >= machine.l2) return {32, columns, columns, depth, 0, 0};
  return {nearest({48, 96, 192}, widening ? 2 * rows : rows), columns, columns, depth, 0, 0};
}

TileConfig built_in(const Shape& shape) {
  const Kernels& current = kernels(runtime::isa(shape.dtype));
  const bool bf16 = shape.dtype == Dtype::kBf16;
  return built_in(shape, runtime::machine(), bf16 && !current.pairs_in_registers,
                  bf16 && current.tiles);
}

TileTable::TileTable(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    const auto& all = configurations(Operation(entry.key.low & 0xff));
    const auto match = std::find_if(all.begin(), all.end(), [&](const TileConfig& config) {
      return name_of(config) == entry.config;
    });
    if (match == all.end())
      throw std::invalid_argument("tile table: no configuration is named '" + entry.config + "'");
    entries_[entry.key] = &*match;
  }
}

const TileConfig* TileTable::find(const Key& key, bool* exact) const {
  auto entry = entries_.find(key);
  *exact = entry != entries_.end();
  if (*exact) return entry->second;
  // Prefer the same shape with fewer threads to all other keys.
  for (Key fewer = key; fewer.threads_bucket() > 0;) {
    fewer.low -= uint64_t(1) << kThreadsShift;
    entry = entries_.find(fewer);
    if (entry != entries_.end()) return entry->second;
  }
  return nearest_to(key);
}

const TileConfig* TileTable::nearest_to(const Key& key) const {
  // Each thread caches its last few misses, because the same ones occur in every layer.
  struct Cached {
    const TileTable* table;
    Key key;
    const TileConfig* config;
  };
  thread_local Cached cache[16] = {};
  Cached& slot = cache[KeyHash{}(key) % 16];
  if (slot.table == this && slot.key == key) return slot.config;
  const TileConfig* best = nullptr;
  int min_distance = -1;
  for (const auto& [other, config] : entries_) {
    const int octaves = distance(key, other);
    if (octaves >= 0 && (min_distance < 0 || octaves < min_distance)) {
      min_distance = octaves;
      best = config;
    }
  }
  slot = {this, key, best};
  return best;
}

}  // namespace vlora::atmm

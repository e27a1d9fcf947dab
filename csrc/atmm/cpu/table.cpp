#include "atmm/table.h"

#include <algorithm>
#include <cstdlib>
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

// Octaves apart. Rows and rank decide between streaming and blocking, so they weigh most; a table
// of another operation or type says nothing.
int distance(const Key& a, const Key& b) {
  if ((a.low ^ b.low) & 0xffff) return -1;
  const auto wide = [](const Key& key, int shift) {
    return log2_of(key.high >> shift & 0xffffffffu);
  };
  return 8 * std::abs(field(a.low, 2) - field(b.low, 2)) +
         8 * std::abs(field(a.low, 3) - field(b.low, 3)) +
         std::abs(field(a.low, 4) - field(b.low, 4)) +
         4 * std::abs(wide(a, 0) - wide(b, 0)) + 4 * std::abs(wide(a, 32) - wide(b, 32));
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
              bucket(s.rank, 3, 10) << 24 | bucket(s.segments, 0, 5) << 32,
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

TileConfig built_in(const Shape& s) {
  // All panels of a bundle: they lie in one stream. (A tile is never wider than its instruction set's
  // widest.)
  const int columns = kMaxBundle * kPanel;
  if (s.operation == Operation::kMerge) {
    // 4096 columns of a rank-64 A are all of a 1 MiB L2, and yet better than less: rows of W are
    // then streamed whole (0.85 of the limit where 1024 columns reach 0.77). One tile of W ahead.
    return {8, 0, columns, 0, kMaxBundle, true, 4096};
  }
  // Adapters are read once and nothing is used twice: 64 lines (4 KiB) of prefetch, what a memory
  // latency of 100 ns holds at 40 GB/s.
  if (s.rows <= 8) return {8, columns, columns, 0, 64, false, 0};
  // Wide tiles: 6 rows by 64 columns fill AVX-512's registers and load least per product (16
  // columns with AVX2's). Rows are read in place: copying them costs more than their stride does
  // (160 against 195 GFLOP/s at d = 4096, rank 64). 256 deep panels of 64 columns are 64 KiB of L2,
  // and 96 rows of a rank-64 intermediate 24 KiB of L1.
  return {96, columns, columns, 256, 0, false, 0};
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
  const auto found = entries_.find(key);
  *exact = found != entries_.end();
  return *exact ? found->second : nearest(key);
}

const TileConfig* TileTable::nearest(const Key& key) const {
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

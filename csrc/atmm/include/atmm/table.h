// Tile configurations, and the table that chooses one for a shape in nanoseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "atmm/kernels.h"
#include "atmm/types.h"
#include "runtime/machine.h"

namespace vlora::atmm {

// The properties on which the choice of a tile depends, before they are rounded to buckets.
struct Shape {
  Operation operation;
  Dtype dtype;
  int64_t rows, d_in, d_out, rank, segments;
  int64_t threads = 1;
};

constexpr int kThreadsShift = 40;

// A shape's buckets in 128 bits. low: operation, dtype, rows, rank, segments and threads, 8 bits
// each; high: d_in and d_out, 32 bits each.
struct Key {
  uint64_t low, high;
  bool operator==(const Key& other) const { return low == other.low && high == other.high; }
  int dtype() const { return int(low >> 8 & 0xff); }
  int threads_bucket() const { return int(low >> kThreadsShift & 0xff); }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = key.low * 0x9e3779b97f4a7c15u ^ key.high;
    h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
    return size_t(h ^ (h >> 32));
  }
};

// Returns the key of a shape. Buckets are powers of two, named by their upper end: rows 1 … 8192,
// ranks 8 … 1024, segments 1 … 32, threads 1 … 64. Larger values fall into the last bucket.
Key key_of(const Shape& shape);

const std::vector<TileConfig>& configurations(Operation operation);
std::string name_of(const TileConfig& config);

// Returns the configuration that applies without a table. It depends on the shape, on the machine,
// and on whether the instruction set converts bf16 panels to fp32 (`widening`) or multiplies tiles
// of bf16 (`tiles`). The code gives the reason for each number.
TileConfig built_in(const Shape& shape, const runtime::Machine& machine, bool widening, bool tiles);
// Returns the built-in configuration for this machine and the instruction set in use.
TileConfig built_in(const Shape& shape);

struct Entry {
  Key key;
  std::string config;
};

// The table of one instruction set. It does not change after it is published, so any thread may use
// it.
class TileTable {
 public:
  // Throws std::invalid_argument if no configuration has an entry's name.
  explicit TileTable(const std::vector<Entry>& entries);
  // Returns the entry of `key`. Without one, returns the entry of the nearest key and sets `exact`
  // to false, or returns null if the key's operation and type have no entries.
  const TileConfig* find(const Key& key, bool* exact) const;

 private:
  const TileConfig* nearest_to(const Key& key) const;
  std::unordered_map<Key, const TileConfig*, KeyHash> entries_;
};

// Numbers of look-ups: exact hits, misses that took the nearest key's entry, and built-in choices.
struct Counters {
  std::atomic<uint64_t> hits{0}, misses{0}, defaults{0};
};

}  // namespace vlora::atmm

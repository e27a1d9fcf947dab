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

// What a choice depends on, in the caller's numbers.
struct Shape {
  Operation operation;
  Dtype dtype;
  int64_t rows, d_in, d_out, rank, segments;
  int64_t threads = 1;
};

constexpr int kThreadsShift = 40;

// 128 bits: (operation, dtype, rows bucket, rank bucket, segments bucket, threads bucket), (d_in, d_out).
struct Key {
  uint64_t low, high;
  bool operator==(const Key& other) const { return low == other.low && high == other.high; }
  int dtype() const { return int(low >> 8 & 0xff); }
  int threads() const { return int(low >> kThreadsShift & 0xff); }  // the bucket
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = key.low * 0x9e3779b97f4a7c15u ^ key.high;
    h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
    return size_t(h ^ (h >> 32));
  }
};

// Buckets are powers of two, each named by its upper end: rows 1 … 8192, ranks 8 … 1024,
// segments 1 … 32, threads 1 … 64; beyond lies the last one.
Key key_of(const Shape& shape);

const std::vector<TileConfig>& configurations(Operation operation);
std::string name_of(const TileConfig& config);

// The choice where no table says otherwise: a function of the shape, the machine, and whether the
// instruction set makes bf16 panels fp32, or multiplies tiles of bf16. Each number in it carries its reason.
TileConfig built_in(const Shape& shape, const runtime::Machine& machine, bool widening, bool tiles);
// Of this machine and the instruction set in use.
TileConfig built_in(const Shape& shape);

struct Entry {
  Key key;
  std::string config;
};

// One per instruction set. Immutable once published; look-ups are safe from any thread.
class TileTable {
 public:
  explicit TileTable(const std::vector<Entry>& entries);  // throws for an unknown configuration
  // The entry of the shape's key, or of the nearest one (then `exact` is false); null: none fits.
  const TileConfig* find(const Key& key, bool* exact) const;

 private:
  const TileConfig* nearest_to(const Key& key) const;
  std::unordered_map<Key, const TileConfig*, KeyHash> entries_;
};

struct Counters {
  std::atomic<uint64_t> hits{0}, misses{0}, defaults{0};
};

}  // namespace vlora::atmm

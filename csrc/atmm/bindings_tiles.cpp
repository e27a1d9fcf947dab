#include "atmm/bindings_tiles.h"

#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/dispatch.h"
#include "runtime/names.h"

namespace py = pybind11;

namespace vlora::atmm {
namespace {

using TableRows = std::vector<std::tuple<uint64_t, uint64_t, std::string>>;

// The choices of this process. They change rarely, and every call reads them.
struct State {
  std::mutex mutex;
  std::vector<std::unique_ptr<const TileTable>> all_tables;  // a call may still read a replaced one
  std::atomic<const TileTable*> tables[runtime::kIsas][kDtypes] = {};
  std::atomic<const TileConfig*> pinned{nullptr};
  std::atomic<bool> fixed_order{false};
  Counters counters;
};

State& state() {
  static State* const state = new State;  // never freed: calls may still run at exit
  return *state;
}

Operation operation_of(const std::string& name) {
  if (name == "apply") return Operation::kApply;
  if (name == "merge") return Operation::kMerge;
  throw std::invalid_argument("unknown operation '" + name + "'; valid are apply and merge");
}

const TileConfig& configuration_named(const std::string& name) {
  for (const Operation operation : {Operation::kApply, Operation::kMerge})
    for (const TileConfig& config : configurations(operation))
      if (name_of(config) == name) return config;
  throw std::invalid_argument("no configuration is named '" + name + "'");
}

// Replaces the tables of the instruction set in use. A type without entries has no table.
void use_table(const TableRows& rows) {
  State& s = state();
  std::vector<Entry> entries[kDtypes];
  for (const auto& [low, high, name] : rows) {
    const Entry entry{{low, high}, name};
    if (entry.key.dtype() >= kDtypes)
      throw std::invalid_argument("tile table: a key has the unknown type " +
                                  std::to_string(entry.key.dtype()));
    entries[entry.key.dtype()].push_back(entry);
  }
  std::lock_guard<std::mutex> lock(s.mutex);
  std::unique_ptr<const TileTable> tables[kDtypes];
  for (int dtype = 0; dtype < kDtypes; ++dtype)
    if (!entries[dtype].empty()) tables[dtype] = std::make_unique<const TileTable>(entries[dtype]);
  for (int dtype = 0; dtype < kDtypes; ++dtype) {
    s.tables[int(runtime::isa(Dtype(dtype)))][dtype] = tables[dtype].get();
    if (tables[dtype]) s.all_tables.push_back(std::move(tables[dtype]));
  }
}

// Pins one tile for all shapes, and with it the order of sums. name: a configuration, "default" for
// the built-in tile, or "" to choose tiles by shape again. Returns the name pinned before.
std::string pin(const std::string& name) {
  State& s = state();
  const bool has_no_config = name.empty() || name == "default";
  const TileConfig* const next = has_no_config ? nullptr : &configuration_named(name);
  const TileConfig* const previous = s.pinned.exchange(next);
  const bool was_pinned = s.fixed_order.exchange(!name.empty());
  return previous ? name_of(*previous) : was_pinned ? "default" : "";
}

py::list configs(const std::string& operation, const std::string& dtype) {
  dtype_of(dtype);  // throws if it is unknown
  py::list result;
  for (const TileConfig& c : configurations(operation_of(operation))) {
    py::dict row;
    row["name"] = name_of(c);
    row["row_block"] = c.row_block;
    row["shrink_columns"] = c.shrink_columns;
    row["expand_columns"] = c.expand_columns;
    row["depth_block"] = c.depth_block;
    row["prefetch"] = c.prefetch;
    row["column_block"] = c.column_block;
    result.append(row);
  }
  return result;
}

Shape shape_of(const std::string& operation, const std::string& dtype, int64_t rows, int64_t d_in,
               int64_t d_out, int64_t rank, int64_t segments, int64_t threads) {
  return {operation_of(operation), dtype_of(dtype), rows, d_in, d_out, rank, segments, threads};
}

}  // namespace

const Kernels& current_kernels(Dtype dtype) { return kernels(runtime::isa(dtype)); }

TileChooser::TileChooser(Operation operation, int64_t config, bool fixed_order)
    : fixed_order_(fixed_order || state().fixed_order) {
  const auto& all = configurations(operation);
  if (config >= int64_t(all.size()))
    throw std::invalid_argument("there is no configuration " + std::to_string(config) +
                                "; valid are 0 to " + std::to_string(all.size() - 1));
  if (config >= 0) explicit_ = &all[size_t(config)];
}

TileConfig TileChooser::choose(const Shape& shape) const {
  State& s = state();
  if (explicit_) return *explicit_;
  if (fixed_order_ && shape.operation == Operation::kApply) {
    const TileConfig* pinned = s.pinned;
    return pinned ? *pinned : built_in({shape.operation, shape.dtype, 64, 0, 0, 64, 1});
  }
  const int isa = int(runtime::isa(shape.dtype));
  if (const TileTable* table = s.tables[isa][int(shape.dtype)]) {
    bool exact;
    if (const TileConfig* config = table->find(key_of(shape), &exact)) {
      (exact ? s.counters.hits : s.counters.misses).fetch_add(1, std::memory_order_relaxed);
      return *config;
    }
  }
  s.counters.defaults.fetch_add(1, std::memory_order_relaxed);
  return built_in(shape);
}

bool TileChooser::fixed_order() const { return fixed_order_; }

void bind_tiles(py::module_& m) {
  m.def("bundle", [](const std::string& dtype) { return current_kernels(dtype_of(dtype)).bundle; });
  m.def("configs", &configs);
  m.def("key", [](const std::string& operation, const std::string& dtype, int64_t rows,
                  int64_t d_in, int64_t d_out, int64_t rank, int64_t segments, int64_t threads) {
    const Key key = key_of(shape_of(operation, dtype, rows, d_in, d_out, rank, segments, threads));
    return std::make_tuple(key.low, key.high);
  });
  m.def("built_in",
        [](const std::string& operation, const std::string& dtype, int64_t rows, int64_t d_in,
           int64_t d_out, int64_t rank, int64_t segments, int64_t threads) {
          return name_of(
              built_in(shape_of(operation, dtype, rows, d_in, d_out, rank, segments, threads)));
        });
  // The built-in choice on another machine: l1 and l2 in bytes, memory in bytes/s for one core.
  m.def("built_in_on",
        [](const std::string& operation, const std::string& dtype, int64_t rows, int64_t rank,
           int64_t l1, int64_t l2, double memory, bool widening, bool tiles) {
          const Shape shape = shape_of(operation, dtype, rows, 1024, 1024, rank, 1, 1);
          return name_of(
              built_in(shape, runtime::Machine{l1, l2, 32 << 20, {}, memory}, widening, tiles));
        });
  m.def("use_table", &use_table);
  m.def("pin", &pin);
  m.def("counters", [] {
    const Counters& c = state().counters;
    py::dict result;
    result["hits"] = c.hits.load();
    result["misses"] = c.misses.load();
    result["defaults"] = c.defaults.load();
    return result;
  });
  m.def("reset_counters", [] {
    Counters& c = state().counters;
    c.hits = c.misses = c.defaults = 0;
  });
}

}  // namespace vlora::atmm

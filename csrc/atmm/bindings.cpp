// Python's face of the operator. Checks what it is given and says what was wrong; knows numbers and
// addresses, not tensors, so that it needs no torch to build.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "atmm/operator.h"
#include "runtime/dispatch.h"
#include "runtime/large_pages.h"
#include "runtime/names.h"

namespace py = pybind11;
using namespace vlora;
using namespace vlora::atmm;

namespace {

Operation operation_of(const std::string& name) {
  if (name == "apply") return Operation::kApply;
  if (name == "merge") return Operation::kMerge;
  throw std::invalid_argument("operation '" + name + "' is neither apply nor merge");
}

const TileConfig& named(const std::string& name) {
  for (const Operation operation : {Operation::kApply, Operation::kMerge})
    for (const TileConfig& config : configurations(operation))
      if (name_of(config) == name) return config;
  throw std::invalid_argument("no configuration is named '" + name + "'");
}

// What the process has chosen: instruction set, tables, pinned tile. Changed rarely, read always.
struct State {
  std::mutex change;
  std::vector<std::unique_ptr<const TileTable>> kept;  // a call may still read an old one
  std::atomic<const TileTable*> tables[runtime::kIsas][kDtypes] = {};
  std::atomic<const TileConfig*> pinned{nullptr};
  std::atomic<bool> one_order{false};
  Counters counters;
};

const Kernels& current(Dtype dtype) { return kernels(runtime::isa(dtype)); }

State& state() {
  static State* const state = new State;  // outlives whatever still runs at exit
  return *state;
}

class Lookup : public Chooser {
 public:
  explicit Lookup(Operation operation, int64_t config) {
    const auto& all = configurations(operation);
    if (config >= int64_t(all.size()))
      throw std::invalid_argument("configuration " + std::to_string(config) + " of " +
                                  std::to_string(all.size()));
    if (config >= 0) forced_ = &all[size_t(config)];
  }

  TileConfig choose(const Shape& shape) const override {
    State& s = state();
    if (forced_) return *forced_;
    if (s.one_order && shape.operation == Operation::kApply) {
      const TileConfig* pinned = s.pinned;
      return pinned ? *pinned : built_in({shape.operation, shape.dtype, 64, 0, 0, 64, 1});
    }
    const int isa = int(runtime::isa(shape.dtype));
    if (const TileTable* table = s.tables[isa][int(shape.dtype)]) {
      bool exact;
      if (const TileConfig* found = table->find(key_of(shape), &exact)) {
        (exact ? s.counters.hits : s.counters.misses).fetch_add(1, std::memory_order_relaxed);
        return *found;
      }
    }
    s.counters.defaults.fetch_add(1, std::memory_order_relaxed);
    return built_in(shape);
  }

  bool one_order() const override { return state().one_order; }

 private:
  const TileConfig* forced_ = nullptr;
};

// A segment list with its Python-made numbers.
std::unique_ptr<SegmentList> make_segments(
    const std::vector<std::tuple<int64_t, int64_t, int32_t, int32_t>>& rows) {
  std::vector<Segment> segments;
  for (const auto& [start, length, slot, sign] : rows) segments.push_back({start, length, slot, sign});
  return std::make_unique<SegmentList>(std::move(segments));
}

// A matrix as the caller holds it: strides in elements.
struct Matrix {
  uintptr_t address;
  int64_t rows, columns;
  ptrdiff_t row_stride, column_stride;

  const void* at() const { return reinterpret_cast<const void*>(address); }
};

// One adapter's pair for one projection: a [rank, d_in], b [d_out, rank]. A head: a [classes, d_in],
// b [1, classes], its bias.
struct Factors {
  Matrix a, b;
};

// Every slot's packed pairs at one moment. A call goes through those that it found, whatever is
// published meanwhile; a slot's store is freed with the last snapshot that has it.
struct Slots {
  std::vector<Pair> pairs;  // [slots][outputs]
  std::vector<std::shared_ptr<const void>> stores;
};

// The projections of one input and what goes through them, by slot. What is packed is its own.
class Group {
 public:
  Group(int64_t d_in, const std::vector<int64_t>& d_outs, const std::string& dtype)
      : d_in_(d_in), dtype_(dtype_of(dtype)), bundle_(current(dtype_).bundle) {
    if (d_outs.empty() || d_outs.size() > size_t(kMaxOutputs))
      throw std::invalid_argument("a group has 1 to " + std::to_string(kMaxOutputs) +
                                  " outputs, not " + std::to_string(d_outs.size()));
    int64_t column = 0;
    for (int64_t d_out : d_outs) {
      if (d_in < 1 || d_out < 1 || d_in > INT32_MAX || d_out > INT32_MAX)
        throw std::invalid_argument("a group's sizes must be positive 32-bit numbers");
      outputs_.push_back({d_out, column});
      column += d_out;
    }
  }

  // Memory that one adapter takes here, its ranks by output, 0 for none: a multiple of a vector.
  size_t slot_bytes(const std::vector<int64_t>& ranks) const {
    if (ranks.size() != outputs_.size())
      throw std::invalid_argument(std::to_string(ranks.size()) + " pairs for " +
                                  std::to_string(outputs_.size()) + " outputs");
    size_t bytes = 0;
    for (size_t o = 0; o < ranks.size(); ++o)
      if (ranks[o] > 0)
        bytes += vlora::atmm::packed_bytes(ranks[o], d_in_, dtype_, true) +
                 vlora::atmm::packed_bytes(outputs_[o].d_out, ranks[o], dtype_, false);
    return bytes;
  }

  // Packs one adapter, its factors for each output or none, and publishes it; `slot` is a present one
  // or the next. The matrices are read before this returns, without the interpreter's lock. into:
  // memory of the caller's, (address, bytes), which outlives every call that may find the slot;
  // without it the group has its own.
  void set_slot(int64_t slot, const std::vector<std::optional<Factors>>& factors,
                const std::optional<std::pair<uintptr_t, size_t>>& into) {
    std::vector<int64_t> ranks;
    for (const auto& f : factors) ranks.push_back(f ? f->a.rows : 0);
    const size_t bytes = slot_bytes(ranks);
    for (size_t o = 0; o < factors.size(); ++o)
      if (const auto& f = factors[o]) {
        const Matrix &a = f->a, &b = f->b;
        if (a.rows < 1 || a.rows > INT32_MAX || a.columns != d_in_ || b.rows != outputs_[o].d_out ||
            b.columns != a.rows)
          throw std::invalid_argument("output " + std::to_string(o) + ": a pair of rank " +
                                      std::to_string(a.rows) + " does not fit");
      }
    if (into && (into->second < bytes || into->first % 64))
      throw std::invalid_argument("a slot of " + std::to_string(bytes) + " bytes does not go into " +
                                  std::to_string(into->second) + " at " +
                                  std::to_string(into->first % 64) + " past a line's start");
    py::gil_scoped_release released;
    const std::shared_ptr<char> store = into ? nullptr : runtime::in_large_pages(bytes);
    char* at = into ? reinterpret_cast<char*>(into->first) : store.get();
    std::vector<Pair> pairs(factors.size(), Pair{0, nullptr, nullptr});
    for (size_t o = 0; o < factors.size(); ++o)
      if (const auto& f = factors[o]) {
        pairs[o].rank = int32_t(f->a.rows);
        pairs[o].a = pack(&at, f->a, true);
      }
    for (size_t o = 0; o < factors.size(); ++o)
      if (const auto& f = factors[o]) pairs[o].b = pack(&at, f->b, false);
    publish(slot, pairs, store);
  }

  // The same of a head, fp32: its bias is kept as it is.
  void set_head(int64_t slot, const std::optional<Factors>& head) {
    if (!head) return clear_slot(slot);
    const Matrix &w = head->a, &bias = head->b;
    if (w.rows < 1 || w.rows > INT32_MAX || w.columns != d_in_ || bias.rows != 1 ||
        bias.columns != w.rows || dtype_ != Dtype::kFp32)
      throw std::invalid_argument("a head of " + std::to_string(w.rows) + " classes does not fit");
    py::gil_scoped_release released;
    const size_t bias_bytes = (size_t(w.rows) * sizeof(float) + 63) / 64 * 64;
    const std::shared_ptr<char> store = runtime::in_large_pages(packed_bytes(w, true) + bias_bytes);
    char* at = store.get();
    Pair pair{int32_t(w.rows), pack(&at, w, true), at};
    for (int64_t i = 0; i < w.rows; ++i)
      reinterpret_cast<float*>(at)[i] = static_cast<const float*>(bias.at())[i * bias.column_stride];
    publish(slot, {pair}, store);
  }

  // From now on nothing goes through the slot.
  void clear_slot(int64_t slot) {
    publish(slot, std::vector<Pair>(outputs_.size(), Pair{0, nullptr, nullptr}), nullptr);
  }

  // fp32: x and y are, whatever the matrices; else they are as the matrices.
  void apply(uintptr_t y, int64_t y_stride, uintptr_t x, int64_t x_stride, int64_t rows, bool fp32,
             const SegmentList& segments, int64_t config, int threads) const {
    const std::shared_ptr<const Slots> slots = now();
    const Problem p = problem(*slots, y, y_stride, x, x_stride, rows, segments,
                              fp32 ? Dtype::kFp32 : dtype_);
    const Lookup chooser(Operation::kApply, config);
    py::gil_scoped_release released;
    vlora::atmm::apply(current(dtype_), p, segments, chooser, threads);
  }

  // `apply` to fp32 rows, what is known before the rows first.
  void add(const SegmentList& segments, int threads, uintptr_t y, int64_t y_stride, uintptr_t x,
           int64_t x_stride, int64_t rows) const {
    apply(y, y_stride, x, x_stride, rows, true, segments, -1, threads);
  }

  void heads(uintptr_t y, int64_t y_stride, uintptr_t x, int64_t x_stride, int64_t rows,
             const SegmentList& segments) const {
    const std::shared_ptr<const Slots> slots = now();
    const Problem p = problem(*slots, y, y_stride, x, x_stride, rows, segments, dtype_);
    py::gil_scoped_release released;
    vlora::atmm::heads(current(dtype_), p, segments);
  }

 private:
  size_t packed_bytes(const Matrix& m, bool first) const {
    return vlora::atmm::packed_bytes(m.rows, m.columns, dtype_, first);
  }

  const void* pack(char** at, const Matrix& m, bool first) const {
    char* const to = *at;
    vlora::atmm::pack(to, m.at(), m.rows, m.columns, m.row_stride, m.column_stride, dtype_, bundle_,
                      first);
    *at += packed_bytes(m, first);
    return to;
  }

  std::shared_ptr<const Slots> now() const {
    std::lock_guard<std::mutex> lock(change_);
    return slots_;
  }

  void publish(int64_t slot, const std::vector<Pair>& pairs, std::shared_ptr<const void> store) {
    std::shared_ptr<const Slots> before;  // freed after the lock
    std::lock_guard<std::mutex> lock(change_);
    before = slots_;
    auto next = std::make_shared<Slots>(*before);
    if (slot < 0 || size_t(slot) > next->stores.size())
      throw std::invalid_argument("slot " + std::to_string(slot) + " is neither one of the " +
                                  std::to_string(next->stores.size()) + " nor the next");
    const size_t outputs = outputs_.size();
    if (size_t(slot) == next->stores.size()) {
      next->stores.emplace_back();
      next->pairs.resize(next->pairs.size() + outputs);
    }
    std::copy(pairs.begin(), pairs.end(), next->pairs.begin() + ptrdiff_t(size_t(slot) * outputs));
    next->stores[size_t(slot)] = std::move(store);
    slots_ = std::move(next);
  }

  Problem problem(const Slots& packed, uintptr_t y, int64_t y_stride, uintptr_t x, int64_t x_stride,
                  int64_t rows, const SegmentList& segments, Dtype rows_dtype) const {
    const int64_t slots = int64_t(packed.stores.size());
    if (segments.slots() > slots)
      throw std::invalid_argument("slot " + std::to_string(segments.slots() - 1) +
                                  " is not one of the " + std::to_string(slots) + " adapters");
    if (segments.rows() > rows) {
      for (int wave = 0; wave < segments.waves(); ++wave)
        for (const Segment* s = segments.begin(wave); s != segments.end(wave); ++s)
          if (s->start + s->length > rows)
            throw std::invalid_argument("segment " + SegmentList::text(*s) + " lies outside the " +
                                        std::to_string(rows) + " rows");
      throw std::invalid_argument("a segment lies outside the " + std::to_string(rows) + " rows");
    }
    const size_t size = size_of(rows_dtype);
    if (x % size || y % size) throw std::invalid_argument("x or y is not aligned to its type");
    Problem p{};
    p.dtype = dtype_;
    p.rows_dtype = rows_dtype;
    p.rows = rows;
    p.d_in = d_in_;
    p.x = reinterpret_cast<const void*>(x);
    p.x_stride = x_stride;
    p.y = reinterpret_cast<void*>(y);
    p.y_stride = y_stride;
    p.outputs = int32_t(outputs_.size());
    p.output = outputs_.data();
    p.slots = slots;
    p.pairs = packed.pairs.data();
    p.bundle = bundle_;
    return p;
  }

  const int64_t d_in_;
  const Dtype dtype_;
  const int bundle_;  // its matrices were packed so, whatever the instruction set of a call
  std::vector<Output> outputs_;
  mutable std::mutex change_;
  std::shared_ptr<const Slots> slots_ = std::make_shared<Slots>();
};

// An adapter's work list: the updates, then what is copied.
struct Merges {
  std::vector<Merge> all;

  Merges(const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, uintptr_t, uintptr_t>>& updates,
         const std::vector<std::pair<int64_t, int64_t>>& copied) {
    for (const auto& [offset, d_out, d_in, rank, a, b] : updates)
      all.push_back({offset, d_out, d_in, rank, reinterpret_cast<const float*>(a),
                     reinterpret_cast<const float*>(b)});
    for (const auto& [offset, count] : copied) all.push_back({offset, 1, count, 0, nullptr, nullptr});
  }
};

void merge_all(uintptr_t out, uintptr_t in, const std::string& dtype, const Merges& merges, int sign,
               int64_t config, int threads) {
  if (sign != 1 && sign != -1) throw std::invalid_argument("the sign must be +1 or -1");
  const Dtype type = dtype_of(dtype);
  const Lookup chooser(Operation::kMerge, config);
  py::gil_scoped_release released;
  vlora::atmm::merge(current(type), type, reinterpret_cast<void*>(out),
                     reinterpret_cast<const void*>(in), merges.all.data(),
                     int64_t(merges.all.size()), float(sign), chooser, threads);
}

// A table serves the instruction set in use, for each type whose entries it has; none: for no type.
void use_table(const std::vector<std::tuple<uint64_t, uint64_t, std::string>>& rows) {
  State& s = state();
  std::vector<Entry> of[kDtypes];
  for (const auto& [low, high, name] : rows) {
    const Entry entry{{low, high}, name};
    if (entry.key.dtype() >= kDtypes) throw std::invalid_argument("tile table: a key has no type");
    of[entry.key.dtype()].push_back(entry);
  }
  std::lock_guard<std::mutex> lock(s.change);
  std::unique_ptr<const TileTable> made[kDtypes];
  for (int dtype = 0; dtype < kDtypes; ++dtype)
    if (!of[dtype].empty()) made[dtype] = std::make_unique<const TileTable>(of[dtype]);
  for (int dtype = 0; dtype < kDtypes; ++dtype) {
    s.tables[int(runtime::isa(Dtype(dtype)))][dtype] = made[dtype].get();
    if (made[dtype]) s.kept.push_back(std::move(made[dtype]));
  }
}

// "": back to adaptive tiles; "default": the built-in tile; else a configuration's name. What was
// pinned before.
std::string pin(const std::string& name) {
  State& s = state();
  const TileConfig* const next = name.empty() || name == "default" ? nullptr : &named(name);
  const TileConfig* const last = s.pinned.exchange(next);
  const bool ordered = s.one_order.exchange(!name.empty());
  return last ? name_of(*last) : ordered ? "default" : "";
}

py::list configs(const std::string& operation, const std::string& dtype) {
  dtype_of(dtype);
  py::list result;
  for (const TileConfig& c : configurations(operation_of(operation))) {
    py::dict row;
    row["name"] = name_of(c);
    row["row_block"] = c.row_block;
    row["shrink_columns"] = c.shrink_columns;
    row["expand_columns"] = c.expand_columns;
    row["depth_block"] = c.depth_block;
    row["prefetch"] = c.prefetch;
    row["pack_rows"] = c.pack_rows;
    row["column_block"] = c.column_block;
    result.append(row);
  }
  return result;
}

}  // namespace

void bind_atmm(py::module_& m) {
  m.doc() = "ATMM on the CPU; vlora.atmm is its interface.";
  py::class_<SegmentList>(m, "Segments").def(py::init(&make_segments));
  py::class_<Matrix>(m, "Matrix")
      .def(py::init([](uintptr_t address, std::pair<int64_t, int64_t> shape,
                       std::pair<ptrdiff_t, ptrdiff_t> strides) {
             return Matrix{address, shape.first, shape.second, strides.first, strides.second};
           }),
           py::arg("address"), py::arg("shape"), py::arg("strides"));
  py::class_<Factors>(m, "Factors")
      .def(py::init([](const Matrix& a, const Matrix& b) { return Factors{a, b}; }), py::arg("a"),
           py::arg("b"));
  py::class_<Merges>(m, "Merges")
      .def(py::init<const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, uintptr_t,
                                                 uintptr_t>>&,
                    const std::vector<std::pair<int64_t, int64_t>>&>());
  py::class_<Group>(m, "Group")
      .def(py::init<int64_t, const std::vector<int64_t>&, const std::string&>())
      .def("slot_bytes", &Group::slot_bytes, py::arg("ranks"))
      .def("set_slot", &Group::set_slot, py::arg("slot"), py::arg("factors"),
           py::arg("into") = py::none())
      .def("set_head", &Group::set_head)
      .def("clear_slot", &Group::clear_slot)
      .def("apply", &Group::apply)
      .def("add", &Group::add)
      .def("heads", &Group::heads);
  m.def("merge", &merge_all);
  m.def("bundle", [](const std::string& dtype) { return current(dtype_of(dtype)).bundle; });
  m.def("configs", &configs);
  m.def("key", [](const std::string& operation, const std::string& dtype, int64_t rows,
                  int64_t d_in, int64_t d_out, int64_t rank, int64_t segments, int64_t threads) {
    const Key key = key_of({operation_of(operation), dtype_of(dtype), rows, d_in, d_out, rank,
                            segments, threads});
    return std::make_tuple(key.low, key.high);
  });
  m.def("built_in", [](const std::string& operation, const std::string& dtype, int64_t rows,
                       int64_t d_in, int64_t d_out, int64_t rank, int64_t segments, int64_t threads) {
    return name_of(built_in({operation_of(operation), dtype_of(dtype), rows, d_in, d_out, rank,
                             segments, threads}));
  });
  // On a machine of the caller's: the bytes of L1 and L2, bytes/s from memory.
  m.def("built_in_on", [](const std::string& operation, const std::string& dtype, int64_t rows,
                          int64_t rank, int64_t l1, int64_t l2, double memory, bool widening,
                          bool tiles) {
    const Shape shape{operation_of(operation), dtype_of(dtype), rows, 1024, 1024, rank, 1, 1};
    return name_of(built_in(shape, runtime::Machine{l1, l2, 32 << 20, {}, memory}, widening, tiles));
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

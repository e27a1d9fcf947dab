#include "atmm/bindings_group.h"

#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "atmm/bindings_tiles.h"
#include "atmm/operator.h"
#include "runtime/kernel_call.h"
#include "runtime/large_pages.h"
#include "runtime/names.h"
#include "steps/recording.h"

namespace py = pybind11;

namespace vlora::atmm {
namespace {

std::unique_ptr<SegmentList> make_segments(
    const std::vector<std::tuple<int64_t, int64_t, int32_t, int32_t>>& rows) {
  std::vector<Segment> segments;
  for (const auto& [start, length, slot, sign] : rows)
    segments.push_back({start, length, slot, sign});
  return std::make_unique<SegmentList>(std::move(segments));
}

// A matrix in the caller's memory. Strides are in elements.
struct Matrix {
  uintptr_t address;
  int64_t rows, columns;
  ptrdiff_t row_stride, column_stride;

  const void* data() const { return reinterpret_cast<const void*>(address); }
};

// One adapter's pair for one projection: a [rank, d_in], b [d_out, rank]. For a task head, a is the
// weight [classes, d_in] and b the bias [1, classes].
struct Factors {
  Matrix a, b;
};

// The packed pairs of all slots at one moment. A call keeps the snapshot that it started with, even
// if a newer one is published meanwhile. A slot's memory is freed with the last snapshot that uses
// it.
struct Snapshot {
  std::vector<Pair> pairs;                           // [slots][outputs]
  std::vector<std::shared_ptr<const void>> storage;  // [slots]: owners of the pairs' memory
};

// A snapshot for one call. It is given back under the lock that guards the group's own pointer, so
// whoever holds the lock can tell whether calls are using the snapshot.
class HeldSnapshot {
 public:
  HeldSnapshot(std::mutex& mutex, const std::shared_ptr<Snapshot>& current) : mutex_(mutex) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = current;
  }
  HeldSnapshot(const HeldSnapshot&) = delete;
  HeldSnapshot& operator=(const HeldSnapshot&) = delete;
  ~HeldSnapshot() {
    std::lock_guard<std::mutex> lock(mutex_);
    held_.reset();
  }
  const Snapshot& operator*() const { return *held_; }

 private:
  std::mutex& mutex_;
  std::shared_ptr<const Snapshot> held_;
};

// Projections that share an input, and their packed adapters by slot.
class Group {
 public:
  Group(int64_t d_in, const std::vector<int64_t>& d_outs, const std::string& dtype)
      : d_in_(d_in), dtype_(dtype_of(dtype)), bundle_(current_kernels(dtype_).bundle) {
    if (d_outs.empty() || d_outs.size() > size_t(kMaxOutputs))
      throw std::invalid_argument("a group cannot have " + std::to_string(d_outs.size()) +
                                  " outputs; valid are 1 to " + std::to_string(kMaxOutputs));
    int64_t column = 0;
    for (int64_t d_out : d_outs) {
      if (d_in < 1 || d_out < 1 || d_in > INT32_MAX || d_out > INT32_MAX)
        throw std::invalid_argument("the sizes d_in " + std::to_string(d_in) + " and d_out " +
                                    std::to_string(d_out) +
                                    " of a group must be positive 32-bit numbers");
      outputs_.push_back({d_out, column});
      column += d_out;
    }
  }

  // Returns the bytes of one adapter's packed matrices, a multiple of 64. ranks: by output, 0 if
  // the adapter does not target the output.
  size_t slot_bytes(const std::vector<int64_t>& ranks) const {
    if (ranks.size() != outputs_.size())
      throw std::invalid_argument(std::to_string(ranks.size()) + " pairs for " +
                                  std::to_string(outputs_.size()) + " outputs");
    size_t bytes = 0;
    for (size_t o = 0; o < ranks.size(); ++o)
      if (ranks[o] > 0)
        bytes += atmm::packed_bytes(ranks[o], d_in_, dtype_, true) +
                 atmm::packed_bytes(outputs_[o].d_out, ranks[o], dtype_, false);
    return bytes;
  }

  // Packs one adapter (its factors by output, or none) and publishes it in an existing slot or the
  // next new one. The matrices are read before this returns, without the interpreter's lock. into:
  // (address, bytes) of the caller's memory, which must outlive every call that may use the slot.
  // Without `into` the group allocates memory.
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
          throw std::invalid_argument(
              "output " + std::to_string(o) + ": A [" + std::to_string(a.rows) + ", " +
              std::to_string(a.columns) + "] and B [" + std::to_string(b.rows) + ", " +
              std::to_string(b.columns) + "] must be [rank, " + std::to_string(d_in_) + "] and [" +
              std::to_string(outputs_[o].d_out) + ", rank] with a rank of at least 1");
      }
    if (into && (into->second < bytes || into->first % 64))
      throw std::invalid_argument("a slot of " + std::to_string(bytes) +
                                  " bytes does not fit into " + std::to_string(into->second) +
                                  " bytes that begin " + std::to_string(into->first % 64) +
                                  " bytes after a multiple of 64");
    const runtime::KernelCall call;
    const std::shared_ptr<char> storage = into ? nullptr : runtime::in_large_pages(bytes);
    char* next = into ? reinterpret_cast<char*>(into->first) : storage.get();
    std::vector<Pair> pairs(factors.size(), Pair{0, nullptr, nullptr});
    for (size_t o = 0; o < factors.size(); ++o)
      if (const auto& f = factors[o]) {
        pairs[o].rank = int32_t(f->a.rows);
        pairs[o].a = pack(&next, f->a, true);
      }
    for (size_t o = 0; o < factors.size(); ++o)
      if (const auto& f = factors[o]) pairs[o].b = pack(&next, f->b, false);
    publish(slot, pairs, storage);
  }

  // Packs an fp32 task head and publishes it in a slot, like set_slot(). The bias is copied without
  // packing.
  void set_head(int64_t slot, const std::optional<Factors>& head) {
    if (!head) return clear_slot(slot);
    const Matrix &w = head->a, &bias = head->b;
    if (w.rows < 1 || w.rows > INT32_MAX || w.columns != d_in_ || bias.rows != 1 ||
        bias.columns != w.rows || dtype_ != Dtype::kFp32)
      throw std::invalid_argument(
          "a head must have an fp32 weight [classes, " + std::to_string(d_in_) +
          "] and a bias [1, classes]; the weight is [" + std::to_string(w.rows) + ", " +
          std::to_string(w.columns) + "] and the bias [" + std::to_string(bias.rows) + ", " +
          std::to_string(bias.columns) + "]");
    const runtime::KernelCall call;
    const size_t bias_bytes = (size_t(w.rows) * sizeof(float) + 63) / 64 * 64;
    const std::shared_ptr<char> storage =
        runtime::in_large_pages(packed_bytes(w, true) + bias_bytes);
    char* next = storage.get();
    Pair pair{int32_t(w.rows), pack(&next, w, true), next};
    for (int64_t i = 0; i < w.rows; ++i)
      reinterpret_cast<float*>(next)[i] =
          static_cast<const float*>(bias.data())[i * bias.column_stride];
    publish(slot, {pair}, storage);
  }

  // Empties a slot: segments that name it add nothing.
  void clear_slot(int64_t slot) {
    publish(slot, std::vector<Pair>(outputs_.size(), Pair{0, nullptr, nullptr}), nullptr);
  }

  // From now on, the sums of a row do not depend on the other rows of a call.
  void fix_order() { fixed_order_ = true; }

  // x and y are fp32 if `fp32`. Otherwise they have the type of the matrices.
  void apply(uintptr_t y, int64_t y_stride, uintptr_t x, int64_t x_stride, int64_t rows, bool fp32,
             const SegmentList& segments, int64_t config, int threads) const {
    steps::Inputs own{threads};
    own.segments = &segments;
    steps::perform(own, [=](const steps::Inputs& inputs) {
      const HeldSnapshot current(mutex_, snapshot_);
      const Problem p = problem(*current, y, y_stride, x, x_stride, rows, *inputs.segments,
                                fp32 ? Dtype::kFp32 : dtype_);
      const TileChooser chooser(Operation::kApply, config, fixed_order_);
      atmm::apply(current_kernels(dtype_), p, *inputs.segments, chooser, inputs.threads);
    });
  }

  // Calls apply() on fp32 rows. Arguments that are known before the rows come first, so that Python
  // can bind them in a partial.
  void add(const SegmentList& segments, int threads, uintptr_t y, int64_t y_stride, uintptr_t x,
           int64_t x_stride, int64_t rows) const {
    apply(y, y_stride, x, x_stride, rows, true, segments, -1, threads);
  }

  void heads(uintptr_t y, int64_t y_stride, uintptr_t x, int64_t x_stride, int64_t rows,
             const SegmentList& segments) const {
    const HeldSnapshot current(mutex_, snapshot_);
    const Problem p = problem(*current, y, y_stride, x, x_stride, rows, segments, dtype_);
    const runtime::KernelCall call;
    atmm::heads(current_kernels(dtype_), p, segments);
  }

 private:
  // first: whether the matrix belongs to the first product.
  size_t packed_bytes(const Matrix& m, bool first) const {
    return atmm::packed_bytes(m.rows, m.columns, dtype_, first);
  }

  // Packs a matrix at *next, returns that address and advances it.
  const void* pack(char** next, const Matrix& m, bool first) const {
    char* const to = *next;
    atmm::pack(to, m.data(), m.rows, m.columns, m.row_stride, m.column_stride, dtype_, bundle_,
               first);
    *next += packed_bytes(m, first);
    return to;
  }

  void publish(int64_t slot, const std::vector<Pair>& pairs, std::shared_ptr<const void> storage) {
    std::shared_ptr<Snapshot> previous;  // declared before the lock, so freed after it
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t outputs = outputs_.size(), slots = snapshot_->storage.size();
    if (slot < 0 || size_t(slot) > slots)
      throw std::invalid_argument("slot " + std::to_string(slot) +
                                  " does not exist; valid are 0 to " + std::to_string(slots) +
                                  ", the next new slot");
    // A copy takes time in proportion to the slots, of which there may be 100,000.
    if (snapshot_.use_count() > 1) {
      previous = snapshot_;
      snapshot_ = std::make_shared<Snapshot>(*previous);
    }
    if (size_t(slot) == slots) {
      snapshot_->pairs.resize((slots + 1) * outputs);
      snapshot_->storage.emplace_back();
    }
    std::copy(pairs.begin(), pairs.end(),
              snapshot_->pairs.begin() + ptrdiff_t(size_t(slot) * outputs));
    snapshot_->storage[size_t(slot)].swap(storage);  // The old memory is freed after the lock.
  }

  Problem problem(const Snapshot& current, uintptr_t y, int64_t y_stride, uintptr_t x,
                  int64_t x_stride, int64_t rows, const SegmentList& segments,
                  Dtype rows_dtype) const {
    const int64_t slots = int64_t(current.storage.size());
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
    p.pairs = current.pairs.data();
    p.bundle = bundle_;
    return p;
  }

  const int64_t d_in_;
  const Dtype dtype_;
  const int bundle_;  // fixed, although later calls may use another instruction set
  std::vector<Output> outputs_;
  bool fixed_order_ = false;
  mutable std::mutex mutex_;
  std::shared_ptr<Snapshot> snapshot_ = std::make_shared<Snapshot>();
};

}  // namespace

void bind_group(py::module_& m) {
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
  py::class_<Group>(m, "Group")
      .def(py::init<int64_t, const std::vector<int64_t>&, const std::string&>())
      .def("slot_bytes", &Group::slot_bytes, py::arg("ranks"))
      .def("set_slot", &Group::set_slot, py::arg("slot"), py::arg("factors"),
           py::arg("into") = py::none())
      .def("set_head", &Group::set_head)
      .def("clear_slot", &Group::clear_slot)
      .def("fix_order", &Group::fix_order)
      .def("apply", &Group::apply)
      .def("add", &Group::add)
      .def("heads", &Group::heads);
}

}  // namespace vlora::atmm

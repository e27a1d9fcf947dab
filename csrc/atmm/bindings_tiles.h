// Choices of tiles for the whole process: tables, a pinned tile, and the counters of look-ups.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "atmm/operator.h"

namespace vlora::atmm {

// Returns the kernels of the instruction set in use.
const Kernels& current_kernels(Dtype dtype);

// Chooses a tile from the first of these that has one: an explicit configuration, the pinned tile,
// the table, the built-in choice.
class TileChooser : public Chooser {
 public:
  // config: index into configurations(operation), or -1. Throws std::invalid_argument if it is too
  // large. fixed_order: choose as if a tile were pinned, so that the order of sums is.
  TileChooser(Operation operation, int64_t config, bool fixed_order = false);

  TileConfig choose(const Shape& shape) const override;
  bool fixed_order() const override;

 private:
  const TileConfig* explicit_ = nullptr;
  bool fixed_order_;
};

void bind_tiles(pybind11::module_& m);

}  // namespace vlora::atmm

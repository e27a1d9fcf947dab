// Products with the integers of int4 weights in panels of 16 rows, on a tile unit. x is the left
// factor and W the right one.
//
// The integers less 8 are exact in bf16. The sums of a group, or of a part of it, are stored from a
// tile of sums, corrected for the zeros, multiplied by the scales and added to totals in registers.
#pragma once

#include <algorithm>
#include <utility>

#include "quantized/panel_tiles.h"

namespace vlora::quantized::VLORA_ISA {

// Returns the tiles of depth whose sums are scaled together: those of a group, unless the last
// group of a row is not complete.
inline int tiles_in_step(const Weight& w) {
  const int tiles = 1 << (w.group_shift - 5);
  return w.blocks() * (kBlock / kMinGroup) % tiles ? int(kBlock / kMinGroup) : tiles;
}

// Converts the integers of panels [from, to), within a slice of the depth, step by step to a ring
// of tiles. After the last step follows the first one again.
template <int kTiles>
class Conversion {
 public:
  static constexpr int kParts = kQuarters * kTiles;

  VLORA_INLINE Conversion(const Weight& w, const PanelSlice& slice, int64_t from, int64_t to,
                          char* ring, int64_t slots)
      : begin_(w.values + from * kTilePanelRows * w.row_bytes() + slice.from * kStoredTile),
        panels_(to - from),
        steps_(slice.count / kTiles),
        gap_(kTilePanelRows * w.row_bytes() - slice.count * kStoredTile),
        ring_(ring),
        end_(ring + slots * kTiles * kTile),
        at_(begin_),
        to_(ring),
        panels_left_(panels_),
        steps_left_(steps_) {}

  // Converts some of the parts of a step.
  template <int kFrom, int kUntil>
  VLORA_INLINE void parts() const {
    constexpr int64_t kStored = kStoredTile / kQuarters;
#pragma GCC unroll 16
    for (int i = kFrom; i < kUntil; ++i) {
      __builtin_prefetch(at_ + i * kStored + kValuesAhead, 0, 3);
      table_.convert(at_ + i * kStored, to_ + i * (kTile / kQuarters));
    }
  }
  // Moves to the next step.
  VLORA_INLINE void next() {
    at_ += kTiles * kStoredTile, to_ += kTiles * kTile;
    if (to_ == end_) to_ = ring_;
    if (--steps_left_ > 0) return;
    at_ += gap_, steps_left_ = steps_;
    if (--panels_left_ == 0) at_ = begin_, panels_left_ = panels_;
  }

 private:
  const IntegerTable table_{};
  const uint8_t* const begin_;
  const int64_t panels_, steps_, gap_;
  char *const ring_, *const end_;
  const uint8_t* at_;
  char* to_;
  int64_t panels_left_, steps_left_;
};

// Starts the products of all steps in the order in which they are scaled: the steps of a pass for
// each tile of rows of x, then the next pass. After the last pass of a panel follows the first.
template <int kRows, int kTiles>
class Starts {
 public:
  VLORA_INLINE Starts(const PanelSlice& slice, int64_t steps_in_pass, const char* x,
                      const char* ring, int64_t slots)
      : limbs_(slice.limbs()),
        tiles_(slice.tiles()),
        steps_(slice.count / kTiles),
        pass_(steps_in_pass),
        x_tile_bytes_(slice.tile_bytes()),
        x_(x),
        ring_(ring),
        end_(ring + slots * kTiles * kTile),
        x_at_(x),
        w_at_(ring),
        first_w_(ring),
        left_(steps_in_pass) {}

  // Computes the sums of the next step in tile kSum, which is 0 or 1.
  template <int kSum>
  VLORA_INLINE void start() {
    U::zero<kSum>();
    add_tiles<kSum>(std::make_integer_sequence<int, kTiles>{});
    w_at_ += kTiles * kTile;
    if (w_at_ == end_) w_at_ = ring_;
    if (--left_ == 0) next_pass();
  }

 private:
  template <int kSum, int... kTileOf>
  VLORA_INLINE void add_tiles(std::integer_sequence<int, kTileOf...>) {
    (add_tile<kSum, kTileOf>(), ...);
  }
  // Uses few tile registers. With two of each factor, products in fp32 took 10 % longer at times
  // when other work slowed the CPU, and were not faster at other times.
  template <int kSum, int kTileOf>
  VLORA_INLINE void add_tile() {
    constexpr int kLine = kRows * kTileLine;
    U::load<6>(w_at_ + kTileOf * kTile, kTileLine);
    if (limbs_ == kLimbs) {
      U::load<4>(x_at_ + 2 * kLine, kTileLine);
      U::multiply<kSum, 4, 6>();
      U::load<4>(x_at_ + kLine, kTileLine);
      U::multiply<kSum, 4, 6>();
    }
    U::load<4>(x_at_, kTileLine);
    U::multiply<kSum, 4, 6>();
    x_at_ += limbs_ * kLine;
  }
  VLORA_INLINE void next_pass() {
    if (++tile_ < tiles_) {
      w_at_ = first_w_;
    } else {
      first_w_ = w_at_, tile_ = 0;
      step_ = step_ + pass_ < steps_ ? step_ + pass_ : 0;
    }
    left_ = std::min(pass_, steps_ - step_);
    x_at_ = x_ + tile_ * x_tile_bytes_ + step_ * kTiles * limbs_ * kRows * kTileLine;
  }

  const int limbs_;
  const int64_t tiles_, steps_, pass_, x_tile_bytes_;
  const char *const x_, *const ring_, *const end_;
  const char *x_at_, *w_at_, *first_w_;
  int64_t left_, tile_ = 0, step_ = 0;
};

// Registers for the outputs of a panel.
constexpr int kParts = V::kRegisters;

// Sums of kRows rows of x and the outputs of a panel, in registers. There are no lambdas here: the
// compiler would keep what they capture in memory, because the instructions of tiles may read it.
template <int kRows>
struct Totals {
  // Whether zeros are multiplied by the scales once for all rows of x, so that the corrections are
  // added to the totals. For a single row, it is faster to add them to the sums before scaling.
  static constexpr bool kScalesZeros = kRows > 1;

  R total[kRows * kParts];

  // Begins with a stored row of sums each, `stride` floats apart; from `rows` on with zeros.
  VLORA_INLINE void load(const float* from, ptrdiff_t stride, int64_t rows) {
    load(from, stride, rows, std::make_integer_sequence<int, kRows * kParts>{});
  }
  VLORA_INLINE void store(float* to, ptrdiff_t stride, int64_t rows, bool streaming) const {
    store(to, stride, rows, streaming, std::make_integer_sequence<int, kRows * kParts>{});
  }
  // Adds a tile of sums times the scales of the outputs. If W has zeros, the sums are corrected
  // with the zero terms of the rows of x. Meanwhile, it converts a step of W if kConverts.
  template <bool kZeros, bool kConverts, int kTiles>
  VLORA_INLINE void add(const float* sums, const float* scales, const int8_t* zeros,
                        const float* terms, const Conversion<kTiles>& conversion) {
    R scale[kParts], zero[kParts];
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      scale[i] = R::load(scales + i * R::kWidth);
      zero[i] = kZeros ? load_bytes(zeros + i * R::kWidth) : R::zero();
      if constexpr (kScalesZeros) zero[i] = zero[i] * scale[i];
    }
    add<kZeros, kConverts>(sums, scale, zero, terms, conversion,
                           std::make_integer_sequence<int, kRows>{});
  }

 private:
  template <int... kIndex>
  VLORA_INLINE void load(const float* from, ptrdiff_t stride, int64_t rows,
                         std::integer_sequence<int, kIndex...>) {
    ((total[kIndex] = kIndex / kParts < rows
                          ? R::load(from + kIndex / kParts * stride + kIndex % kParts * R::kWidth)
                          : R::zero()),
     ...);
  }
  template <int... kIndex>
  VLORA_INLINE void store(float* to, ptrdiff_t stride, int64_t rows, bool streaming,
                          std::integer_sequence<int, kIndex...>) const {
    ((kIndex / kParts < rows
          ? store_one(total[kIndex], to + kIndex / kParts * stride + kIndex % kParts * R::kWidth,
                      streaming)
          : void()),
     ...);
  }
  template <bool kZeros, bool kConverts, int kTiles, int... kRow>
  VLORA_INLINE void add(const float* sums, const R (&scale)[kParts], const R (&zero)[kParts],
                        const float* terms, const Conversion<kTiles>& conversion,
                        std::integer_sequence<int, kRow...>) {
    (add_row<kRow, kZeros, kConverts>(sums, scale, zero, terms, conversion), ...);
  }
  template <int kRow, bool kZeros, bool kConverts, int kTiles>
  VLORA_INLINE void add_row(const float* sums, const R (&scale)[kParts], const R (&zero)[kParts],
                            const float* terms, const Conversion<kTiles>& conversion) {
    if constexpr (kConverts) {
      constexpr int kAll = Conversion<kTiles>::kParts;
      conversion.template parts<kAll * kRow / kRows, kAll*(kRow + 1) / kRows>();
    }
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      R products = R::load(sums + kRow * kLanes + i * R::kWidth);
      R& sum = total[kRow * kParts + i];
      if constexpr (kZeros)
        (kScalesZeros ? sum : products).add_product(R::broadcast(terms + kRow), zero[i]);
      sum.add_product(products, scale[i]);
    }
  }
};

// The steps of a panel of W in a pass.
struct Pass {
  int64_t begin, end;
  const float* scales;  // of the panel
  const int8_t* zeros;
  int64_t first_step;  // of the slice, in the panel
  int shift;           // logarithm of the steps in a group
  const float* terms;  // zero terms of a tile of rows of x, from `begin` on
};

// Adds the products of a pass to the totals. sum_at: where in `sums` those of its first step are.
template <bool kZeros, bool kConverts, int kRows, int kTiles>
VLORA_INLINE void multiply_pass(const Pass& pass, Totals<kRows>& totals,
                                Starts<kRows, kTiles>& starts, Conversion<kTiles>& conversion,
                                float* sums, int& sum_at) {
  const float* terms = pass.terms;
  for (int64_t step = pass.begin; step < pass.end; ++step) {
    float* const next = sums + (kSumFloats - sum_at);
    if (sum_at == 0) {
      starts.template start<0>();
      U::store<1>(next, kTileLine);
    } else {
      starts.template start<1>();
      U::store<0>(next, kTileLine);
    }
    const int64_t index = ((pass.first_step + step) >> pass.shift) * kTilePanelRows;
    __builtin_prefetch(pass.scales + index + kScalesAhead / 4, 0, 3);
    if constexpr (kZeros) __builtin_prefetch(pass.zeros + index + kZerosAhead, 0, 3);
    totals.template add<kZeros, kConverts>(sums + sum_at, pass.scales + index,
                                           kZeros ? pass.zeros + index : nullptr, terms,
                                           conversion);
    if constexpr (kConverts) conversion.next();
    sum_at = kSumFloats - sum_at;
    terms += kRows;
  }
}

// Multiplies panels [from, to) of W, in a slice of the depth, with packed tiles of kRows rows of x.
// kTiles: tiles of depth in a step. scratch: see `PanelSlice::scratch_bytes`.
//
// Three steps overlap: the products of step i + 2 start, the sums of step i + 1 are stored, and
// those of step i are scaled while a later step of W is converted. If x has several tiles of rows,
// each pass of some steps is repeated for all of them, while its converted tiles are in L1.
template <int kRows, int kTiles, bool kZeros>
void multiply_panels(const Product& p, const PanelSlice& slice, const char* x, int64_t from,
                     int64_t to, char* scratch) {
  const Weight& w = p.w;
  const int64_t steps = slice.count / kTiles, tiles = slice.tiles(),
                in_pass = tiles == 1 ? steps : std::min<int64_t>(steps, kIntegerTiles / kTiles),
                slots = kStepsAhead + (tiles == 1 ? 0 : in_pass);
  auto* const sums = reinterpret_cast<float*>(scratch);
  char* const ring = scratch + kSumTiles * kTile;
  auto* const stored = reinterpret_cast<float*>(scratch + kPanelScratch * kTile);
  configure(kRows, kRows, kAmxRows);
  Conversion<kTiles> conversion(w, slice, from, to, ring, slots);
  for (int i = 0; i < kStepsAhead; ++i, conversion.next())
    conversion.template parts<0, Conversion<kTiles>::kParts>();
  Starts<kRows, kTiles> starts(slice, in_pass, x, ring, slots);
  starts.template start<0>();
  U::store<0>(sums, kTileLine);
  starts.template start<1>();
  int sum_at = 0;
  Pass pass;
  pass.first_step = slice.from / kTiles;
  // A group has several steps if the last one of a row is not complete.
  pass.shift = 0;
  while (kMinGroup * kTiles << pass.shift < int64_t(1) << w.group_shift) ++pass.shift;
  for (int64_t panel = from; panel < to; ++panel) {
    pass.scales = w.scales + panel * w.groups() * kTilePanelRows;
    pass.zeros = w.zeros + (kZeros ? panel * w.groups() * kTilePanelRows : 0);
    for (pass.begin = 0; pass.begin < steps; pass.begin = pass.end) {
      pass.end = std::min(steps, pass.begin + in_pass);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = tile * kRows, rows = std::min<int64_t>(kRows, slice.rows - row);
        float* const y = p.y + (slice.row + row) * p.y_stride + panel * kTilePanelRows;
        float* const sums_of_tile = stored + row * kLanes;
        Totals<kRows> totals;
        if (pass.begin > 0)
          totals.load(sums_of_tile, kLanes, kRows);
        else if (slice.adds())
          totals.load(y, p.y_stride, rows);
        else
          totals.load(p.bias ? p.bias + panel * kTilePanelRows : nullptr, 0, p.bias ? kRows : 0);
        pass.terms =
            reinterpret_cast<const float*>(x + tile * slice.tile_bytes() + slice.value_bytes()) +
            pass.begin * kRows;
        if (tile == 0)
          multiply_pass<kZeros, true>(pass, totals, starts, conversion, sums, sum_at);
        else
          multiply_pass<kZeros, false>(pass, totals, starts, conversion, sums, sum_at);
        if (pass.end < steps)
          totals.store(sums_of_tile, kLanes, kRows, false);
        else
          totals.store(y, p.y_stride, rows, slice.streaming);
      }
    }
  }
}

template <int kRows, int kTiles>
void multiply_tiles_of_rows(const Product& p, const PanelSlice& slice, const char* x, int64_t from,
                            int64_t to, char* scratch) {
  if (p.w.zeros)
    multiply_panels<kRows, kTiles, true>(p, slice, x, from, to, scratch);
  else
    multiply_panels<kRows, kTiles, false>(p, slice, x, from, to, scratch);
}

template <int kRows>
void multiply_rows(const Product& p, const PanelSlice& slice, const char* x, int64_t from,
                   int64_t to, char* scratch) {
  switch (tiles_in_step(p.w)) {
    case 1:
      return multiply_tiles_of_rows<kRows, 1>(p, slice, x, from, to, scratch);
    case 2:
      return multiply_tiles_of_rows<kRows, 2>(p, slice, x, from, to, scratch);
    default:
      return multiply_tiles_of_rows<kRows, 4>(p, slice, x, from, to, scratch);
  }
}

}  // namespace vlora::quantized::VLORA_ISA

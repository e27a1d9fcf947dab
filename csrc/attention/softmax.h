// Scores to weights, and what becomes of sums at the end, for one instruction set.
#pragma once

#include <cmath>

#include "attention/attention.h"

namespace vlora::attention::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

constexpr float kSlack = 8;
// A new maximum is taken when it is so much over the last one: weights stay under e to this power.
constexpr int64_t kScoreStride = kBlockPanels * kLanes;

// Panels whose scores are held at a time, and which of their tokens a row sees.
struct Visible {
  int64_t count;
  int64_t position[kBlockPanels], room[kBlockPanels];  // of the first token, for how many

  // Panels begin … begin + panels - 1 of a sequence.
  Visible(const Layout& layout, int64_t begin, int64_t panels) : count(panels) {
    for (int64_t j = 0; j < panels; ++j) {
      const int64_t page = (begin + j) / layout.panels(), first = (begin + j) % layout.panels() * kLanes;
      position[j] = page * layout.block + first;
      room[j] = layout.block - first < kLanes ? layout.block - first : kLanes;
    }
  }

  // Those that begin up to a position.
  int64_t panels(int64_t at) const {
    int64_t found = count;
    while (found > 0 && position[found - 1] > at) --found;
    return found;
  }
  // How many of the first `panels` panels' scores count for the row of a position, after those in
  // between that hold nothing, or what comes later, were left out.
  VLORA_INLINE int64_t mask(int64_t at, int64_t panels, int64_t block, float* scores) const {
    if (block % kLanes == 0) {  // there is nothing in between
      const int64_t until = at + 1 - position[0];
      return until < 0 ? 0 : until < panels * kLanes ? until : panels * kLanes;
    }
    int64_t valid = 0;
    for (int64_t j = 0; j < panels; ++j) {
      const int64_t until = at + 1 - position[j];
      const int64_t here = until < 0 ? 0 : until < room[j] ? until : room[j];
      if (here > 0) valid = j * kLanes + here;
      if (here < kLanes && j + 1 < panels)
        for (int64_t s = here; s < kLanes; ++s) scores[j * kLanes + s] = -INFINITY;
    }
    return valid;
  }
};

constexpr float kLeast = -60;
// Lower ones weigh as much as this, next to nothing; what a weight's upper half leaves is then a normal
// number yet: others take a hundred times as long.

// e to the power of x, which is at most 88, to about two units in the last place; of kLeast where it is
// less. Half as many operations as runtime/math.h's, whose range is wider. A NaN stays one.
VLORA_INLINE R weight_of(R x) {
  constexpr float kLog2 = 1.44269504f, kWhole = 12582912.0f + 127;
  x = max(R::all(kLeast), x);
  // Added to a number so large that no bit is left for fractions, x / log 2 is rounded; its low bits are
  // then the exponent of that power of two.
  R whole = R::all(kWhole);
  whole.add_product(x, R::all(kLog2));
  R rest = R::all(kWhole) - whole;
  rest.add_product(x, R::all(kLog2));
  // 2 to the power of -1/2 … 1/2, with the least relative error, 8e-8, that five powers allow.
  R power = R::all(1.327647245e-03f);
  const float coefficients[] = {9.675540961e-03f, 5.550713092e-02f, 2.402212024e-01f, 6.931469440e-01f,
                                1.000000119f};
#pragma GCC unroll 5
  for (const float c : coefficients) {
    R next = R::all(c);
    next.add_product(power, rest);
    power = next;
  }
  return power * whole.exponent_of_low_bits();
}

// One item's scores, the first `valid` of them, to weights, the others up to `slots` to zeros; its
// earlier sums are scaled to the new maximum, if it is one. sum: of each lane. kHalves: every 32 scores
// give way to the upper halves of their weights and what these leave, as bf16; `slots` is a multiple.
template <bool kHalves>
VLORA_INLINE void soften(float* scores, int64_t valid, int64_t slots, float& most, float* sum,
                         float* out, int64_t padded) {
  constexpr int64_t kAtOnce = kHalves ? 2 * kLanes : R::kWidth;
  const int64_t used = ceil_div(valid, kAtOnce) * kAtOnce;
  for (int64_t i = used; i < slots; i += R::kWidth) R::zero().store(scores + i);
  for (int64_t i = valid / R::kWidth * R::kWidth; i < used; i += R::kWidth)
    R::load(scores + i).first(int(valid - i), R::all(-INFINITY)).store(scores + i);
  R high = R::all(most);
  for (int64_t i = 0; i < used; i += R::kWidth) high = max(high, R::load(scores + i));
  const float now = high.largest();
  if (now == -INFINITY) {
    for (int64_t i = 0; i < used; ++i) scores[i] = 0;
    return;
  }
  if (!(now <= most + kSlack)) {  // a NaN is taken
    if (most != -INFINITY) {  // else there are none
      const R factor = exponential(R::all(most - now));
      (R::load(sum) * factor).store(sum);
      for (int64_t d = 0; d < padded; d += R::kWidth) (R::load(out + d) * factor).store(out + d);
    }
    most = now;
  }
  const R level = R::all(most);
  R total = R::load(sum);
  if constexpr (kHalves) {
    // What is left out weighs next to nothing.
    constexpr int kAll = 2 * kLanes / R::kWidth;
    const auto store = [](auto first, auto second, uint16_t* high) __attribute__((always_inline)) {
      decltype(first)::store_halves(first, second, high, high + kAtOnce);
    };
    for (int64_t i = 0; i < used; i += kAtOnce) {
      R weights[kAll];
#pragma GCC unroll 8
      for (int n = 0; n < kAll; ++n) {
        weights[n] = weight_of(R::load(scores + i + n * R::kWidth) - level);
        total = total + weights[n];
      }
      uint16_t* const to = reinterpret_cast<uint16_t*>(scores + i);
#pragma GCC unroll 8
      for (int n = 0; n < kAll; n += 2)
        store(weights[n], weights[n + 1], to + n * R::kWidth);
    }
  } else {
    for (int64_t i = 0; i < used; i += R::kWidth) {
      R weight = weight_of(R::load(scores + i) - level);
      if (valid < i + R::kWidth) weight = weight.first(int(valid - i), R::zero());
      weight.store(scores + i);
      total = total + weight;
    }
  }
  total.store(sum);
}

// One item's values, times `factor`, to where they belong.
VLORA_INLINE void finish(const float* values, float factor, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + R::kWidth <= dim; d += R::kWidth) (R::load(values + d) * R::all(factor)).store(to + d);
  for (; d < dim; ++d) to[d] = values[d] * factor;
}

inline void combine(const Problem& p, const Piece& piece, const float* partials) {
  const Plan& plan = *p.plan;
  const int64_t group = plan.heads / plan.layout.kv_heads, of_head = piece.rows * group;
  const int64_t padded = plan.layout.padded(), dim = plan.layout.dim, size = partial_floats(plan);
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  float found[kMostDim];
  for (int64_t i = 0; i < of_head * piece.kv_heads; ++i) {
    float most = -INFINITY;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float here = partials[part * size + i];
      if (!(here <= most)) most = here;  // a NaN stays
    }
    for (int64_t d = 0; d < padded; d += R::kWidth) R::zero().store(found + d);
    float sum = 0;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float* from = partials + part * size;
      if (from[i] == -INFINITY) continue;
      const R weight = exponential(R::all(from[i] - most));
      sum += weight.largest() * from[plan.items() + i];
      const float* values = from + 2 * plan.items() + i * padded;
      for (int64_t d = 0; d < padded; d += R::kWidth) {
        R value = R::load(found + d);
        value.add_product(weight, R::load(values + d));
        value.store(found + d);
      }
    }
    const int64_t head = (piece.kv_head + i / of_head) * group + i % group;
    float* y = p.y + (chunk.row + piece.row + i % of_head / group) * p.y_stride + head * dim;
    finish(found, 1 / sum, dim, y);
  }
}

}  // namespace vlora::attention::VLORA_ISA

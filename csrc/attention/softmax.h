// Conversion of scores to weights, and combination of partial results, for one instruction set.
#pragma once

#include <cmath>

#include "attention/attention.h"

namespace vlora::attention::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// A new maximum is used only if it exceeds the previous one by more than this, which saves
// rescaling the sums. Weights stay below e to this power.
constexpr float kMaxSlack = 8;
// Scores with a smaller exponent get the weight of this exponent, which is almost nothing. The
// remainder of a weight without the upper half of its bits is then still a normal number. Kernels
// treat subnormal numbers as zero, so a subnormal remainder would be lost.
constexpr float kMinExponent = -60;
// Floats between the scores of two queries.
constexpr int64_t kScoreStride = kBlockPanels * kLanes;

// The panels of a block, and the tokens of them that a row attends to.
struct Visible {
  int64_t count;
  int64_t position[kBlockPanels];  // of a panel's first token
  int64_t tokens[kBlockPanels];    // that a panel can hold

  // Panels begin … begin + panels - 1 of a sequence.
  Visible(const Layout& layout, int64_t begin, int64_t panels) : count(panels) {
    for (int64_t j = 0; j < panels; ++j) {
      const int64_t page = (begin + j) / layout.panels(),
                    first = (begin + j) % layout.panels() * kLanes;
      position[j] = page * layout.block + first;
      tokens[j] = layout.block - first < kLanes ? layout.block - first : kLanes;
    }
  }

  // Returns the number of panels whose first token is at or before position `last`.
  int64_t panels(int64_t last) const {
    int64_t visible = count;
    while (visible > 0 && position[visible - 1] > last) --visible;
    return visible;
  }
  // Returns how many of the scores of the first `panels` panels the row at position `last` uses.
  // Scores among them that are of unused slots or of later tokens become -infinity.
  VLORA_INLINE int64_t mask(int64_t last, int64_t panels, int64_t block, float* scores) const {
    if (block % kLanes == 0) {  // no panel has unused slots, except the last one
      const int64_t until = last + 1 - position[0];
      return until < 0 ? 0 : until < panels * kLanes ? until : panels * kLanes;
    }
    int64_t valid = 0;
    for (int64_t j = 0; j < panels; ++j) {
      const int64_t until = last + 1 - position[j];
      const int64_t seen = until < 0 ? 0 : until < tokens[j] ? until : tokens[j];
      if (seen > 0) valid = j * kLanes + seen;
      if (seen < kLanes && j + 1 < panels)
        for (int64_t s = seen; s < kLanes; ++s) scores[j * kLanes + s] = -INFINITY;
    }
    return valid;
  }
};

// Returns e to the power of x, for x up to 88, to about two units in the last place. Below
// kMinExponent it returns the value at kMinExponent. A NaN stays a NaN. It takes half as many
// operations as exponential(), whose range is wider.
VLORA_INLINE R weight_of(R x) {
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f + 127;
  x = max(R::all(kMinExponent), x);
  // kRound is so large that a sum with it has no bits for fractions: adding it rounds x / log 2 to
  // an integer. The low bits of the sum are then the exponent of that power of two.
  R integer = R::all(kRound);
  integer.add_product(x, R::all(kLog2E));
  R rest = R::all(kRound) - integer;
  rest.add_product(x, R::all(kLog2E));
  // A polynomial of degree five gives 2 to the power of -1/2 … 1/2 with the least relative error,
  // 8e-8.
  R power = R::all(1.327647245e-03f);
  const float coefficients[] = {9.675540961e-03f, 5.550713092e-02f, 2.402212024e-01f,
                                6.931469440e-01f, 1.000000119f};
#pragma GCC unroll 5
  for (const float c : coefficients) {
    R next = R::all(c);
    next.add_product(power, rest);
    power = next;
  }
  return power * integer.exponent_of_low_bits();
}

// Turns the first `valid` scores of a query into weights, and the others up to `slots` into zeros.
// If the maximum changes, earlier sums and values are rescaled. sum: partial sums, one per lane.
// out: [padded] values. kSplit: replace every 32 scores by 64 bf16: the upper halves of the
// weights, then their rounded rests. `slots` is then a multiple of 32.
template <bool kSplit>
VLORA_INLINE void to_weights(float* scores, int64_t valid, int64_t slots, float& maximum,
                             float* sum, float* out, int64_t padded) {
  constexpr int64_t kAtOnce = kSplit ? 2 * kLanes : R::kWidth;
  const int64_t used = ceil_div(valid, kAtOnce) * kAtOnce;
  for (int64_t i = used; i < slots; i += R::kWidth) R::zero().store(scores + i);
  if (!valid) return;
  for (int64_t i = valid / R::kWidth * R::kWidth; i < used; i += R::kWidth)
    R::load(scores + i).first(int(valid - i), R::all(-INFINITY)).store(scores + i);
  R high = R::all(maximum);
  for (int64_t i = 0; i < used; i += R::kWidth) high = max(high, R::load(scores + i));
  const float new_maximum = high.largest();
  if (!(new_maximum <= maximum + kMaxSlack)) {  // also true for a NaN
    if (maximum != -INFINITY) {                 // otherwise there are no earlier sums
      const R factor = exponential(R::all(maximum - new_maximum));
      (R::load(sum) * factor).store(sum);
      for (int64_t d = 0; d < padded; d += R::kWidth) (R::load(out + d) * factor).store(out + d);
    }
    maximum = new_maximum;
  }
  const R level = R::all(maximum);
  R total = R::load(sum);
  if constexpr (kSplit) {
    constexpr int kRegisters = 2 * kLanes / R::kWidth;
    const auto store = [](auto first, auto second, uint16_t* high) __attribute__((always_inline)) {
      decltype(first)::store_split(first, second, high, high + kAtOnce);
    };
    for (int64_t i = 0; i < used; i += kAtOnce) {
      R weights[kRegisters];
#pragma GCC unroll 8
      for (int n = 0; n < kRegisters; ++n) {
        const int64_t at = i + n * R::kWidth;
        weights[n] = weight_of(R::load(scores + at) - level);
        if (valid < at + R::kWidth) weights[n] = weights[n].first(int(valid - at), R::zero());
        total = total + weights[n];
      }
      uint16_t* const to = reinterpret_cast<uint16_t*>(scores + i);
#pragma GCC unroll 8
      for (int n = 0; n < kRegisters; n += 2) store(weights[n], weights[n + 1], to + n * R::kWidth);
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

// Writes the values of a query, times `factor`, to the output.
VLORA_INLINE void write_output(const float* values, float factor, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + R::kWidth <= dim; d += R::kWidth) (R::load(values + d) * R::all(factor)).store(to + d);
  for (; d < dim; ++d) to[d] = values[d] * factor;
}

inline void combine(const Problem& p, const Piece& piece, const float* partials) {
  const Plan& plan = *p.plan;
  const int64_t group = plan.heads / plan.layout.kv_heads, per_head = piece.rows * group;
  const int64_t padded = plan.layout.padded(), dim = plan.layout.dim, size = partial_floats(plan);
  const Chunk& chunk = plan.chunks[size_t(piece.chunk)];
  float total[kMaxDim];
  for (int64_t i = 0; i < per_head * piece.kv_heads; ++i) {
    float maximum = -INFINITY;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float part_maximum = partials[part * size + i];
      if (!(part_maximum <= maximum)) maximum = part_maximum;  // also true for a NaN
    }
    for (int64_t d = 0; d < padded; d += R::kWidth) R::zero().store(total + d);
    float sum = 0;
    for (int32_t part = 0; part < piece.parts; ++part) {
      const float* from = partials + part * size;
      if (from[plan.queries() + i] == 0) continue;  // the row sees no tokens of this part
      const R weight = exponential(R::all(from[i] - maximum));
      sum += weight.largest() * from[plan.queries() + i];
      const float* values = from + 2 * plan.queries() + i * padded;
      for (int64_t d = 0; d < padded; d += R::kWidth) {
        R value = R::load(total + d);
        value.add_product(weight, R::load(values + d));
        value.store(total + d);
      }
    }
    const int64_t head = (piece.kv_head + i / per_head) * group + i % group;
    float* y = p.y + (chunk.row + piece.row + i % per_head / group) * p.y_stride + head * dim;
    write_output(total, 1 / sum, dim, y);
  }
}

}  // namespace vlora::attention::VLORA_ISA

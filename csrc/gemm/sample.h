// Draws of tokens from rows of scores. They sort only the part of the vocabulary on which the
// result can depend.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "gemm/elementwise.h"

namespace vlora::gemm::VLORA_ISA {

// Number of weights in a block, of which the sum and the maximum are kept.
constexpr int64_t kSampleBlock = 128;
// The search for enough weights begins at kFirstFloor, multiplies the floor by kFirstFloor at each
// step, and ends at kLowestFloor.
constexpr float kFirstFloor = 0.25f, kLowestFloor = 1e-37f;

// The weights of a row (probabilities times a constant: the largest weight is 1), and the sum and
// maximum of each block of them.
struct Weights {
  std::vector<float> values, block_max;
  std::vector<double> block_sums;
  double total;

  void fill(const float* scores, int64_t width, float temperature) {
    values.resize(size_t(width));
    block_sums.resize(size_t(ceil_div(width, kSampleBlock)));
    block_max.resize(block_sums.size());
    total = 0;
    R high = R::all(-INFINITY);
    int64_t i = 0;
    for (; i + R::kWidth <= width; i += R::kWidth) high = max(high, R::load(scores + i));
    float largest = high.largest();
    for (; i < width; ++i) largest = std::max(largest, scores[i]);
    // exponential() returns this value for masked scores and all others that are too small. It is
    // subtracted, so that their weight is zero.
    const R level = R::all(largest), divisor = R::all(temperature),
            smallest = exponential(R::all(-INFINITY));
    for (size_t block = 0; block < block_sums.size(); ++block) {
      const int64_t until = std::min(width, int64_t(block + 1) * kSampleBlock);
      R sum = R::zero(), top = R::zero();
      for (i = int64_t(block) * kSampleBlock; i + R::kWidth <= until; i += R::kWidth) {
        const R weight = exponential((R::load(scores + i) - level) / divisor) - smallest;
        weight.store(values.data() + i);
        sum = sum + weight;
        top = max(top, weight);
      }
      block_sums[block] = sum_of(sum);
      block_max[block] = top.largest();
      for (; i < until; ++i) {
        const R weight = exponential((R::all(scores[i]) - level) / divisor) - smallest;
        values[size_t(i)] = weight.largest();
        block_sums[block] += values[size_t(i)];
        block_max[block] = std::max(block_max[block], values[size_t(i)]);
      }
      total += block_sums[block];
    }
  }
};

// Some tokens in ascending order, and the sum of their weights.
struct Candidates {
  std::vector<int32_t> tokens;
  double total;

  // Selects all tokens whose weight is at least `floor` and above zero.
  void select(const Weights& weights, float floor) {
    tokens.clear();
    total = 0;
    for (size_t block = 0; block < weights.block_max.size(); ++block) {
      if (weights.block_max[block] < floor) continue;
      const size_t until = std::min(weights.values.size(), (block + 1) * kSampleBlock);
      for (size_t i = block * kSampleBlock; i < until; ++i)
        if (weights.values[i] >= floor && weights.values[i] > 0) {
          tokens.push_back(int32_t(i));
          total += weights.values[i];
        }
    }
  }

  // Selects with the highest floor, not below `lowest`, for which enough() is true. Usually only a
  // few hundred tokens of the vocabulary matter.
  template <class Enough>
  void select_enough(const Weights& weights, float lowest, const Enough& enough) {
    for (float floor = kFirstFloor; floor > std::max(lowest, kLowestFloor); floor *= kFirstFloor) {
      select(weights, floor);
      if (enough()) return;
    }
    select(weights, lowest);
  }
};

// Reduces the candidates to the fewest whose weights add up to at least `mass`, the largest weights
// first. Of equal weights the lower token comes first.
inline void keep_nucleus(const Weights& weights, double mass, Candidates& candidates) {
  auto& tokens = candidates.tokens;
  std::sort(tokens.begin(), tokens.end(), [&](int32_t a, int32_t b) {
    const float x = weights.values[size_t(a)], y = weights.values[size_t(b)];
    return x > y || (x == y && a < b);
  });
  size_t count = 0;
  for (candidates.total = 0; count < tokens.size() && (count == 0 || candidates.total < mass);
       ++count)
    candidates.total += weights.values[size_t(tokens[count])];
  tokens.resize(count);
  std::sort(tokens.begin(), tokens.end());
}

// Returns the token at the quantile `uniform` of all weights. The sums of the blocks
// determine the block, and its weights the token.
inline int64_t pick(const Weights& weights, double uniform) {
  const double target = uniform * weights.total;
  double before = 0;
  size_t block = 0, last = weights.block_sums.size() - 1;
  while (last > 0 && !(weights.block_sums[last] > 0)) --last;
  while (block < last && before + weights.block_sums[block] <= target)
    before += weights.block_sums[block++];
  const size_t until = std::min(weights.values.size(), (block + 1) * kSampleBlock);
  int64_t token = 0;
  for (size_t i = block * kSampleBlock; i < until; ++i) {
    if (!(weights.values[i] > 0)) continue;
    token = int64_t(i);
    before += weights.values[i];
    if (before > target) break;
  }
  return token;
}

inline int64_t pick(const Weights& weights, const Candidates& candidates, double uniform) {
  const double target = uniform * candidates.total;
  double mass = 0;
  int64_t token = 0;
  for (const int32_t i : candidates.tokens) {
    token = i;
    mass += weights.values[size_t(i)];
    if (mass > target) break;
  }
  return token;
}

inline int64_t sample_row(const float* scores, int64_t width, const Draw& draw) {
  static thread_local Weights weights;
  static thread_local Candidates candidates;
  weights.fill(scores, width, draw.temperature);
  bool selected = draw.min_p > 0;
  if (draw.top_k > 0 && draw.top_k < width) {
    selected = true;
    candidates.select_enough(weights, draw.min_p,
                             [&] { return int64_t(candidates.tokens.size()) >= draw.top_k; });
    if (int64_t(candidates.tokens.size()) > draw.top_k) {
      std::vector<float> values;
      for (const int32_t i : candidates.tokens) values.push_back(weights.values[size_t(i)]);
      const auto last = values.begin() + (draw.top_k - 1);
      std::nth_element(values.begin(), last, values.end(), std::greater<float>());
      candidates.select(weights, *last);
    }
  } else if (selected) {
    candidates.select(weights, draw.min_p);
  }
  if (draw.top_p >= 1)
    return selected ? pick(weights, candidates, draw.uniform) : pick(weights, draw.uniform);
  const double mass = draw.top_p * (selected ? candidates.total : weights.total);
  if (!selected) candidates.select_enough(weights, 0, [&] { return candidates.total > mass; });
  keep_nucleus(weights, mass, candidates);
  return pick(weights, candidates, draw.uniform);
}

inline void sample(const Sample& s, int64_t from, int64_t until) {
  for (int64_t i = from; i < until; ++i)
    s.tokens[i] = sample_row(s.scores + s.draws[i].row * s.width, s.width, s.draws[i]);
}

}  // namespace vlora::gemm::VLORA_ISA

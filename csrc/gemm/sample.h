// Draws from rows of scores, without sorting more of a vocabulary than the answer can depend on.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "gemm/elementwise.h"

namespace vlora::gemm::VLORA_ISA {

constexpr int64_t kSampleBlock = 128;
constexpr float kFirstFloor = 0.25f, kLeastFloor = 1e-37f;

// Weights of a row, the largest 1; of each block of them the sum and the largest.
struct Weights {
  std::vector<float> of, tops;
  std::vector<double> sums;
  double total;

  void fill(const float* scores, int64_t width, float temperature) {
    of.resize(size_t(width));
    sums.resize(size_t(ceil_div(width, kSampleBlock)));
    tops.resize(sums.size());
    total = 0;
    R high = R::all(-INFINITY);
    int64_t i = 0;
    for (; i + R::kWidth <= width; i += R::kWidth) high = max(high, R::load(scores + i));
    float most = high.largest();
    for (; i < width; ++i) most = std::max(most, scores[i]);
    // What exponential() gives for all that is too small, and for what is masked, counts as nothing.
    const R level = R::all(most), heat = R::all(temperature), least = exponential(R::all(-INFINITY));
    for (size_t block = 0; block < sums.size(); ++block) {
      const int64_t until = std::min(width, int64_t(block + 1) * kSampleBlock);
      R sum = R::zero(), top = R::zero();
      for (i = int64_t(block) * kSampleBlock; i + R::kWidth <= until; i += R::kWidth) {
        const R weight = exponential((R::load(scores + i) - level) / heat) - least;
        weight.store(of.data() + i);
        sum = sum + weight;
        top = max(top, weight);
      }
      sums[block] = sum_of(sum);
      tops[block] = top.largest();
      for (; i < until; ++i) {
        const R weight = exponential((R::all(scores[i]) - level) / heat) - least;
        of[size_t(i)] = weight.largest();
        sums[block] += of[size_t(i)];
        tops[block] = std::max(tops[block], of[size_t(i)]);
      }
      total += sums[block];
    }
  }
};

// Places of weights, ascending, and the sum of these.
struct Kept {
  std::vector<int32_t> at;
  double total;

  // All of at least `floor`, and more than nothing.
  void from(const Weights& weights, float floor) {
    at.clear();
    total = 0;
    for (size_t block = 0; block < weights.tops.size(); ++block) {
      if (weights.tops[block] < floor) continue;
      const size_t until = std::min(weights.of.size(), (block + 1) * kSampleBlock);
      for (size_t i = block * kSampleBlock; i < until; ++i)
        if (weights.of[i] >= floor && weights.of[i] > 0) {
          at.push_back(int32_t(i));
          total += weights.of[i];
        }
    }
  }

  // Of a vocabulary few hundred tokens matter: those above the highest floor, not below `least`, at
  // which there are enough.
  template <class Enough>
  void enough(const Weights& weights, float least, const Enough& enough) {
    for (float floor = kFirstFloor; floor > std::max(least, kLeastFloor); floor *= kFirstFloor) {
      from(weights, floor);
      if (enough()) return;
    }
    from(weights, least);
  }
};

// The smallest set that holds `wanted`; of equal ones the first. A token stays while the mass before
// it is short.
inline void keep_nucleus(const Weights& weights, double wanted, Kept& kept) {
  std::sort(kept.at.begin(), kept.at.end(), [&](int32_t a, int32_t b) {
    const float x = weights.of[size_t(a)], y = weights.of[size_t(b)];
    return x > y || (x == y && a < b);
  });
  size_t count = 0;
  for (kept.total = 0; count < kept.at.size() && (count == 0 || kept.total < wanted); ++count)
    kept.total += weights.of[size_t(kept.at[count])];
  kept.at.resize(count);
  std::sort(kept.at.begin(), kept.at.end());
}

// At `uniform` of all weights: the block first, by its sum.
inline int64_t pick(const Weights& weights, double uniform) {
  const double target = uniform * weights.total;
  double before = 0;
  size_t block = 0, last = weights.sums.size() - 1;
  while (last > 0 && !(weights.sums[last] > 0)) --last;
  while (block < last && before + weights.sums[block] <= target) before += weights.sums[block++];
  const size_t until = std::min(weights.of.size(), (block + 1) * kSampleBlock);
  int64_t found = 0;
  for (size_t i = block * kSampleBlock; i < until; ++i) {
    if (!(weights.of[i] > 0)) continue;
    found = int64_t(i);
    before += weights.of[i];
    if (before > target) break;
  }
  return found;
}

inline int64_t pick(const Weights& weights, const Kept& kept, double uniform) {
  const double target = uniform * kept.total;
  double mass = 0;
  int64_t found = 0;
  for (const int32_t i : kept.at) {
    found = i;
    mass += weights.of[size_t(i)];
    if (mass > target) break;
  }
  return found;
}

inline int64_t sample_one(const float* scores, int64_t width, const Draw& draw) {
  static thread_local Weights weights;
  static thread_local Kept kept;
  weights.fill(scores, width, draw.temperature);
  bool some = draw.min_p > 0;
  if (draw.top_k > 0 && draw.top_k < width) {
    some = true;
    kept.enough(weights, draw.min_p, [&] { return int64_t(kept.at.size()) >= draw.top_k; });
    if (int64_t(kept.at.size()) > draw.top_k) {
      std::vector<float> values;
      for (const int32_t i : kept.at) values.push_back(weights.of[size_t(i)]);
      const auto last = values.begin() + (draw.top_k - 1);
      std::nth_element(values.begin(), last, values.end(), std::greater<float>());
      kept.from(weights, *last);
    }
  } else if (some) {
    kept.from(weights, draw.min_p);
  }
  if (draw.top_p >= 1) return some ? pick(weights, kept, draw.uniform) : pick(weights, draw.uniform);
  const double wanted = draw.top_p * (some ? kept.total : weights.total);
  if (!some) kept.enough(weights, 0, [&] { return kept.total > wanted; });
  keep_nucleus(weights, wanted, kept);
  return pick(weights, kept, draw.uniform);
}

inline void sample(const Sample& s, int64_t from, int64_t until) {
  for (int64_t i = from; i < until; ++i)
    s.tokens[i] = sample_one(s.scores + s.draws[i].row * s.width, s.width, s.draws[i]);
}

}  // namespace vlora::gemm::VLORA_ISA

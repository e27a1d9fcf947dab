// Quantization of rows to int8 and int4. An unpack header must be included before.
#pragma once

#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "quantized/quantize.h"
#include "runtime/scratch.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int kRangeCount = int(sizeof kRanges / sizeof kRanges[0]);

// Writes `count` weights as fp32, and zeros up to `size`.
template <class T>
void widen_weights(const T* from, int64_t count, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + R::kWidth <= count; i += R::kWidth) R::load(from + i).store(to + i);
  if (i < count) {
    T last[R::kWidth] = {};
    for (int64_t j = 0; i + j < count; ++j) last[j] = from[i + j];
    float wide[R::kWidth];
    R::load(last).store(wide);
    for (int64_t j = 0; i + j < count; ++j) to[i + j] = wide[j];
  }
  std::fill(to + count, to + size, 0.0f);
}

// Rounds 16 floats to 16-bit integers.
struct Words {
  __m128i first, second;
  static VLORA_INLINE Words of(const float* p) {
    const auto four = [&](int i) __attribute__((always_inline)) {
      return _mm_cvtps_epi32(_mm_loadu_ps(p + 4 * i));
    };
    return {_mm_packs_epi32(four(0), four(1)), _mm_packs_epi32(four(2), four(3))};
  }
};

VLORA_INLINE bool is_finite(float value) { return value - value == 0; }

// Returns x, or 1 in lanes where x is not positive, for use as a divisor.
VLORA_INLINE R positive_or_one(R x) { return where_less(R::zero(), x, x, R::all(1)); }

// Quantizes `size` values of a group, a multiple of kMinGroup, to int8. Returns the scale, or a NaN
// if a value is not finite.
inline float quantize_int8(const float* weights, int64_t size, uint8_t* values) {
  R largest = R::zero(), finite = R::zero();
  for (int64_t i = 0; i < size; i += R::kWidth) {
    const R w = R::load(weights + i);
    largest = max(largest, max(w, R::zero() - w));
    finite.add_product(w, R::zero());
  }
  const float scale = largest.largest() / 127;
  const R divisor = positive_or_one(R::all(scale));
  for (int64_t i = 0; i < size; i += 16) {
    float quotients[16];
    for (int j = 0; j < 16; j += R::kWidth)
      (R::load(weights + i + j) / divisor).store(quotients + j);
    const Words words = Words::of(quotients);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i),
                     _mm_packs_epi16(words.first, words.second));
  }
  return scale + sum_of(finite);
}

// Converts a weight, less the mean of its group, to the nearest value of int4.
struct Rounding {
  R inverse, offset;
  // mean: of the weights.
  static VLORA_INLINE Rounding of(R scale, R zero, R mean) {
    const R inverse = R::all(1) / positive_or_one(scale);
    return {inverse, zero + mean * inverse};
  }
  VLORA_INLINE R operator()(R centred) const {
    return min(max(offset + centred * inverse, R::zero()), R::all(15)).nearest();
  }
};

// The int4 values of a group in each lane, and their scale and zero. The larger `gain`, the smaller
// is the squared error. It is what the values take off the sum of the squared weights, in units of
// the squared range, so that it neither overflows nor vanishes.
struct Fit {
  R scale, zero, gain;
  Rounding rounding;
};

// The zeros that can be stored: multiples of `step` from `least` to `most`.
struct ZeroGrid {
  float step, least, most;
  VLORA_INLINE R nearest(R zero) const {
    const R limited = min(max(zero, R::all(least)), R::all(most));
    return (limited * R::all(1 / step)).nearest() * R::all(step);
  }
};

constexpr ZeroGrid kAnyZeros{kZeroStep, -64 * kZeroStep, 191 * kZeroStep}, kWholeZeros{1, 0, 15},
    kNoZeros{1, kMiddle, kMiddle};

// Sums over the values of a group in each lane.
struct Sums {
  R values, squares, products;  // of values; of their squares; of values and centred weights
};

// Groups of weights, one in each lane. All sums are of weights less the mean of their group.
// Otherwise the sums of groups whose weights differ little would lose their leading digits.
// Products that are not exact are rounded before they are added: no instruction set gives another
// result.
class Groups {
 public:
  // weights: R::kWidth groups of `size` weights, one after another.
  // symmetric: whether the fit starts from a range with 0 in its middle.
  Groups(const float* weights, int size, bool symmetric)
      : size_(size), count_(R::all(float(size))) {
    for (int lane = 0; lane < R::kWidth; lane += 4)
      for (int i = 0; i < size; i += 4) {
        Quad quads[4];
        for (int j = 0; j < 4; ++j) quads[j] = Quad::load(weights + (lane + j) * size + i);
        Quad::transpose(quads);
        for (int j = 0; j < 4; ++j) quads[j].store(columns_ + (i + j) * R::kWidth + lane);
      }
    // Local variables stay in registers.
    R low = R::zero(), high = R::zero(), sum = R::zero();
    for (int i = 0; i < size; ++i) {
      const R w = column(i);
      low = min(low, w), high = max(high, w), sum = sum + w;
    }
    if (symmetric) high = max(high, R::zero() - low), low = R::zero() - high;
    const R mean = sum * inverse_count();
    R rest = R::zero();
    for (int i = 0; i < size; ++i) {
      const R centred = column(i) - mean;
      centred.store(columns_ + i * R::kWidth);
      rest = rest + centred;
    }
    low_ = low, high_ = high, mean_ = mean, rest_ = rest;
    unit_ = R::all(1) / positive_or_one(range());
  }

  R mean() const { return mean_; }
  R range() const { return high_ - low_; }

  // Returns the fit with the smallest squared error.
  Fit best_fit(const ZeroGrid& grid) const {
    Fit fits[kRangeCount];
    for (int i = 0; i < kRangeCount; ++i) {
      const R range = R::all(kRanges[i]), low = low_ * range;
      fits[i].scale = (high_ * range - low) / R::all(15);
      fits[i].zero = grid.nearest((R::zero() - low) / positive_or_one(fits[i].scale));
    }
    for (int refit = 0; refit <= kRefits; ++refit) {
      for (Fit& fit : fits) fit.rounding = Rounding::of(fit.scale, fit.zero, mean_);
      Sums sums[kRangeCount];
      add_up(fits, sums);
      for (int i = 0; i < kRangeCount; ++i) {
        if (refit < kRefits) fits[i].zero = fitted_zero(sums[i], fits[i].zero, grid);
        fit_scale(sums[i], fits[i]);
      }
    }
    Fit best = fits[0];
    for (int i = 1; i < kRangeCount; ++i) {
      const Fit& fit = fits[i];
      const R smaller = best.gain;
      const auto better = [&](R fitted, R so_far) __attribute__((always_inline)) {
        return where_less(smaller, fit.gain, fitted, so_far);
      };
      best = {better(fit.scale, best.scale),
              better(fit.zero, best.zero),
              better(fit.gain, best.gain),
              {better(fit.rounding.inverse, best.rounding.inverse),
               better(fit.rounding.offset, best.rounding.offset)}};
    }
    return best;
  }

 private:
  VLORA_INLINE R column(int i) const { return R::load(columns_ + i * R::kWidth); }
  R inverse_count() const { return R::all(1 / float(size_)); }

  VLORA_INLINE void add_up(const Fit (&fits)[kRangeCount], Sums (&sums)[kRangeCount]) const {
    for (Sums& each : sums) each = {R::zero(), R::zero(), R::zero()};
    for (int i = 0; i < size_; ++i) {
      const R w = column(i);
#pragma GCC unroll 2
      for (int j = 0; j < kRangeCount; ++j) {
        const R value = fits[j].rounding(w);
        sums[j].values = sums[j].values + value;
        sums[j].squares.add_product(value, value);
        sums[j].products = sums[j].products + value * w;
      }
    }
  }

  // Returns the zero with the smallest squared error for these values, or `zero` if all values are
  // equal. The sums of values and of their squares are exact in fp32, and so are the terms here
  // that contain only them and zeros.
  VLORA_INLINE R fitted_zero(const Sums& sums, R zero, const ZeroGrid& grid) const {
    const R middle = sums.values * inverse_count();
    const R variance = sums.squares - sums.values * middle;
    const R slope = (sums.products - middle * rest_) / positive_or_one(variance);
    const R mean = mean_ + rest_ * inverse_count();
    const R fitted = grid.nearest(middle - mean / positive_or_one(slope));
    return where_less(R::zero(), slope, fitted, zero);
  }

  // Computes the scale with the smallest squared error for these values.
  VLORA_INLINE void fit_scale(const Sums& sums, Fit& fit) const {
    const R zero = fit.zero;
    const R squares = sums.squares - zero * (sums.values + sums.values - count_ * zero);
    const R products = sums.products - zero * rest_ + mean_ * (sums.values - count_ * zero);
    fit.scale = products / positive_or_one(squares);
    fit.gain = products * unit_ * (fit.scale * unit_);
  }

  const int size_;
  const R count_;
  R low_, high_;   // range from which the fit starts: extremes of the weights and 0
  R unit_;         // 1 / range
  R mean_, rest_;  // mean of the weights; sum of the centred weights, which rounding leaves
  float columns_[kMaxGroup * R::kWidth];  // column i has centred weight i of each group
};

// Writes the bytes of 32 values: byte i has value i in its low bits and value 16 + i in its high
// bits.
VLORA_INLINE void pack_half_block(const float* weights, const Rounding& rounding, R mean,
                                  uint8_t* bytes) {
  float pairs[16];
  for (int i = 0; i < 16; i += R::kWidth) {
    R pair = rounding(R::load(weights + i) - mean);
    pair.add_product(rounding(R::load(weights + 16 + i) - mean), R::all(16));
    pair.store(pairs + i);
  }
  const Words words = Words::of(pairs);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm_packus_epi16(words.first, words.second));
}

// Quantizes `count` weights of a row, those of at most R::kWidth groups of `size`. Writes the
// groups' values, scales and zeros, which may be null. Returns whether all weights are finite and
// not too large.
template <class T>
bool quantize_int4(const T* row, int64_t count, int size, const ZeroGrid& grid, uint8_t* values,
                   float* scales, int8_t* zeros) {
  constexpr int kHalf = int(kMinGroup), kHalfBytes = kHalf / 2;
  float weights[kMaxGroup * R::kWidth];
  widen_weights(row, count, weights, int64_t(size) * R::kWidth);
  const Groups groups(weights, size, zeros == nullptr);
  const Fit fit = groups.best_fit(grid);
  float scale[R::kWidth], zero[R::kWidth], mean[R::kWidth], inverse[R::kWidth], offset[R::kWidth],
      range[R::kWidth];
  fit.scale.store(scale), fit.zero.store(zero), groups.mean().store(mean);
  groups.range().store(range);
  fit.rounding.inverse.store(inverse), fit.rounding.offset.store(offset);
  uint8_t bytes[(kMaxGroup * R::kWidth + kHalf) / 2];
  const int halves = int(ceil_div(count, kHalf));
  bool finite = true;
  for (int group = 0; group < int(ceil_div(count, size)); ++group) {
    scales[group] = scale[group];
    if (zeros != nullptr) zeros[group] = int8_t((zero[group] - kMiddle) / kZeroStep);
    finite = finite && is_finite(mean[group]) && is_finite(scale[group]) && is_finite(range[group]);
    const Rounding rounding{R::all(inverse[group]), R::all(offset[group])};
    const int begin = group * (size / kHalf), end = std::min(halves, begin + size / kHalf);
    for (int half = begin; half < end; ++half)
      pack_half_block(weights + half * kHalf, rounding, R::all(mean[group]),
                      bytes + half * kHalfBytes);
  }
  // Values after the end of the row are 0.
  uint8_t* const last = bytes + (halves - 1) * kHalfBytes;
  for (int64_t i = count - (halves - 1) * kHalf; i < kHalf; ++i)
    last[i % kHalfBytes] &= i < kHalfBytes ? 0xf0 : 0x0f;
  std::memset(bytes + halves * kHalfBytes, 0, kHalfBytes);
  for (int half = 0; half < halves; half += 2) {
    const auto* const both = reinterpret_cast<const __m128i*>(bytes + half * kHalfBytes);
    const __m128i a = _mm_loadu_si128(both), b = _mm_loadu_si128(both + 1);
    auto* const block = reinterpret_cast<__m128i*>(values + half * kHalfBytes);
    _mm_storeu_si128(block, _mm_unpacklo_epi8(a, b));
    _mm_storeu_si128(block + 1, _mm_unpackhi_epi8(a, b));
  }
  return finite;
}

// The kernel of `Kernels::quantize`, by the type of the weights.
template <class T>
int64_t quantize_rows_of(const Quantization& q, int64_t from, int64_t to) {
  const Weight result = q.result();
  const int64_t depth = result.blocks() * kBlock, groups = result.groups();
  const int64_t size = int64_t(1) << q.group_shift;
  static thread_local runtime::Scratch scratch;
  float* const wide = q.bits == 8 ? scratch.get(depth) : nullptr;
  int64_t first_bad = -1;
  for (int64_t row = from; row < to; ++row) {
    const T* const weights = static_cast<const T*>(q.weights) + row * q.stride;
    uint8_t* const values = q.values + row * result.row_bytes();
    float* const scales = q.scales + row * groups;
    bool finite = true;
    if (q.bits == 8) {
      widen_weights(weights, q.k, wide, depth);
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t begin = group * size, count = std::min(size, depth - begin);
        scales[group] = quantize_int8(wide + begin, count, values + begin);
        finite = finite && is_finite(scales[group]);
      }
    } else {
      int8_t* const zeros = q.zeros == nullptr ? nullptr : q.zeros + row * groups;
      const ZeroGrid& stored = q.whole_zeros ? kWholeZeros : kAnyZeros;
      const ZeroGrid& grid = zeros == nullptr ? kNoZeros : stored;
      const int64_t step = size * R::kWidth;
      for (int64_t k = 0; k < q.k; k += step)
        finite &=
            quantize_int4(weights + k, std::min(step, q.k - k), int(size), grid, values + k / 2,
                          scales + k / size, zeros == nullptr ? nullptr : zeros + k / size);
      // Groups after the end of the row.
      const int64_t used = ceil_div(q.k, size);
      std::fill(scales + used, scales + groups, 0.0f);
      if (zeros != nullptr) std::fill(zeros + used, zeros + groups, int8_t(0));
    }
    if (!finite && first_bad < 0) first_bad = row;
  }
  return first_bad;
}

inline int64_t quantize_rows(const Quantization& q, int64_t from, int64_t to) {
  if (q.dtype == Dtype::kBf16) return quantize_rows_of<uint16_t>(q, from, to);
  return quantize_rows_of<float>(q, from, to);
}

}  // namespace vlora::quantized::VLORA_ISA

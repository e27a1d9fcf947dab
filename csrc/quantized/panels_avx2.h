// Gemv with int4 weights in panels, by products of bytes with limbs of x, and the conversion of such
// weights in memory.
//
// A lane of 32 bits belongs to one of the eight rows of a panel, so that values of x are broadcast,
// and no sum of lanes is needed. Sums of integers are exact; they are multiplied by the scales of x
// and W once for each group.
#pragma once

#include <cstring>

#include "quantized/limbs_avx2.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int kPanelRows = int(vlora::quantized::kPanelRows);
// Bytes of a group of a panel.
constexpr int64_t kGroupBytes = kPanelRows * kGroup / 2;
// Bytes of packed x that are multiplied with kPanelsAtOnce panels before the next, a part of L1.
constexpr int64_t kXBytes = 8 << 10;
constexpr int64_t kPanelsAtOnce = 4;

// Packed x: the ends of each row's outliers, the groups (all rows of a group after another), and the
// outliers of one row after another.
template <int kLimbs>
struct PackedX {
  int32_t* ends;
  GroupOfX<kLimbs>* groups;
  Outlier* outliers;

  PackedX(const Product& p, void* memory)
      : ends(static_cast<int32_t*>(memory)),
        groups(reinterpret_cast<GroupOfX<kLimbs>*>(ends + kMaxRows)),
        outliers(reinterpret_cast<Outlier*>(groups + p.rows * groups_of(p.w))) {}
  static int64_t groups_of(const Weight& w) { return w.blocks() * (kBlock / kGroup); }
};

template <int kLimbs>
void pack_limbs(const Product& p, void* to) {
  const PackedX<kLimbs> packed(p, to);
  Outlier* end = packed.outliers;
  for (int64_t t = 0; t < p.rows; ++t) {
    const float* const x = p.x + t * p.x_stride;
    for (int64_t group = 0; group < packed.groups_of(p.w); ++group) {
      const int64_t k = group * kGroup;
      end = pack_group(x + k, k, p.w.k - k, packed.groups[group * p.rows + t], end);
    }
    packed.ends[t] = int32_t(end - packed.outliers);
  }
}

// A group of a panel. zeros: null if W has none.
struct PanelGroup {
  const uint8_t* values;
  const float* scales;
  const int8_t* zeros;

  static VLORA_INLINE PanelGroup of(const Weight& w, int64_t panel, int64_t group) {
    const int64_t scale =
        kPanelRows * (panel * w.groups() + ((group * kGroup) >> w.group_shift));
    return {w.values + panel * kPanelRows * w.row_bytes() + group * kGroupBytes, w.scales + scale,
            w.zeros ? w.zeros + scale : nullptr};
  }
  VLORA_INLINE void prefetch() const {
    __builtin_prefetch(values, 0, 3);
    __builtin_prefetch(values + 64, 0, 3);
    __builtin_prefetch(scales, 0, 3);
    if (zeros) __builtin_prefetch(zeros, 0, 3);
  }
  // Returns the distance of each row's zero from kMiddle, in units of kZeroStep.
  VLORA_INLINE __m256 zero_steps() const {
    if (zeros == nullptr) return _mm256_setzero_ps();
    return load_bytes(zeros).r;
  }
};

// The values of a group of a panel as bytes. The lanes of register i have values 4 i … 4 i + 3 of
// each row.
struct PanelBytes {
  __m256i values[kGroup / 4];

  static VLORA_INLINE PanelBytes load(const uint8_t* p) {
    const __m256i low_bits = _mm256_set1_epi8(15);
    PanelBytes bytes;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
      bytes.values[i] = _mm256_and_si256(both, low_bits);
      bytes.values[4 + i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
    }
    return bytes;
  }

  // Returns the sums of products with a limb. The two sums of a lane are multiplied by `factor`, and
  // added. Each is a sum of 16 products, none above 15 * 128, and so has 16 bits.
  VLORA_INLINE __m256i sums(const int8_t (&limb)[kGroup], int factor) const {
    __m256i sums = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < kGroup / 4; ++i) {
      int32_t four;
      std::memcpy(&four, limb + 4 * i, 4);
      sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(values[i], _mm256_set1_epi32(four)));
    }
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(int16_t(factor)));
  }

  // Returns the sums of products of (value - kMiddle), divided by the scale of x. The sums of the
  // two highest limbs are exact in fp32.
  template <int kLimbs>
  VLORA_INLINE __m256 products(const GroupOfX<kLimbs>& x) const {
    const __m256i high = _mm256_add_epi32(sums(x.limbs[0], 256), sums(x.limbs[1], 1));
    const __m256 total =
        _mm256_cvtepi32_ps(_mm256_add_epi32(high, _mm256_set1_epi32(x.middle[0])));
    if constexpr (kLimbs == 2) return total;
    const __m256i low =
        _mm256_add_epi32(sums(x.limbs[kLimbs - 1], 1), _mm256_set1_epi32(x.middle[kLimbs - 2]));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(1.0f / 256), total);
  }
};

// Adds the products of a group of a panel with `rows` rows of x to their sums.
template <int kLimbs>
VLORA_INLINE void multiply_group(const PanelGroup& at, const GroupOfX<kLimbs>* x, int64_t rows,
                                 __m256* sums) {
  const PanelBytes bytes = PanelBytes::load(at.values);
  const __m256 scales = _mm256_loadu_ps(at.scales), zero_steps = at.zero_steps();
  for (int64_t t = 0; t < rows; ++t) {
    const __m256 products = _mm256_fnmadd_ps(zero_steps, _mm256_broadcast_ss(&x[t].steps),
                                             bytes.products(x[t]));
    sums[t] = _mm256_fmadd_ps(_mm256_mul_ps(products, _mm256_broadcast_ss(&x[t].scale)), scales,
                              sums[t]);
  }
}

// Adds the product with an outlier to the sums of a panel, in fp32.
VLORA_INLINE __m256 add_outlier(const Weight& w, int64_t panel, const Outlier& x, __m256 sums) {
  const int i = x.k % kGroup;
  const PanelGroup at = PanelGroup::of(w, panel, x.k / kGroup);
  const auto* const words = reinterpret_cast<const __m256i*>(at.values) + i % 16 / 4;
  const __m256i shifted = _mm256_srl_epi32(_mm256_loadu_si256(words),
                                           _mm_cvtsi32_si128(8 * (i % 4) + i / 16 * 4));
  const __m256 values = _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)));
  const __m256 zeros = _mm256_fmadd_ps(at.zero_steps(), _mm256_set1_ps(kZeroStep),
                                       _mm256_set1_ps(kMiddle));
  const __m256 weights = _mm256_mul_ps(_mm256_sub_ps(values, zeros), _mm256_loadu_ps(at.scales));
  return _mm256_fmadd_ps(weights, _mm256_set1_ps(x.value), sums);
}

// Multiplies panels [first, last), at most kPanelsAtOnce. kRows: number of rows of x, or 0 for any.
template <int kLimbs, int kRows>
void multiply_panels(const Product& p, const PackedX<kLimbs>& x, int64_t first, int64_t last) {
  const int64_t rows = kRows ? kRows : p.rows, groups = x.groups_of(p.w);
  const int64_t at_once = std::max<int64_t>(1, kXBytes / (rows * int64_t(sizeof *x.groups)));
  __m256 sums[kPanelsAtOnce][kRows ? kRows : kMaxRows];
  for (auto& of_panel : sums) std::fill(of_panel, of_panel + rows, _mm256_setzero_ps());
  for (int64_t from = 0; from < groups; from += at_once) {
    const int64_t to = std::min(groups, from + at_once);
    for (int64_t panel = first; panel < last; ++panel) {
      // The next groups that are multiplied. Those after the last panel may not exist.
      const bool is_last = panel + 1 == last, wraps = is_last && to < groups;
      const int64_t next_panel = wraps ? first : panel + 1;
      const int64_t next = wraps ? to - from : is_last ? -from : 0;
      for (int64_t group = from; group < to; ++group) {
        PanelGroup::of(p.w, next_panel, group + next).prefetch();
        multiply_group(PanelGroup::of(p.w, panel, group), x.groups + group * rows, rows,
                       sums[panel - first]);
      }
    }
  }
  for (int64_t panel = first; panel < last; ++panel) {
    const float* const bias = p.bias ? p.bias + panel * kPanelRows : nullptr;
    int64_t outlier = 0;
    for (int64_t t = 0; t < rows; ++t) {
      __m256 sum = sums[panel - first][t];
      for (; outlier < x.ends[t]; ++outlier)
        sum = add_outlier(p.w, panel, x.outliers[outlier], sum);
      if (bias) sum = _mm256_add_ps(sum, _mm256_loadu_ps(bias));
      _mm256_storeu_ps(p.y + t * p.y_stride + panel * kPanelRows, sum);
    }
  }
}

template <int kLimbs>
void gemv_limbs(const Product& p, const void* packed, int64_t from, int64_t to) {
  const PackedX<kLimbs> x(p, const_cast<void*>(packed));
  for (int64_t panel = from; panel < to; panel += kPanelsAtOnce) {
    const int64_t last = std::min(to, panel + kPanelsAtOnce);
    if (p.rows == 1)
      multiply_panels<kLimbs, 1>(p, x, panel, last);
    else
      multiply_panels<kLimbs, 0>(p, x, panel, last);
  }
}

// Returns the rows of a group of a panel, rows i and i + 4 in the halves of register i.
VLORA_INLINE void rows_of_group(const uint8_t* p, __m256i (&rows)[kPanelRows / 2]) {
  const auto load = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i); };
  const __m256i low[2] = {_mm256_unpacklo_epi32(load(0), load(1)),
                          _mm256_unpacklo_epi32(load(2), load(3))},
                high[2] = {_mm256_unpackhi_epi32(load(0), load(1)),
                           _mm256_unpackhi_epi32(load(2), load(3))};
  rows[0] = _mm256_unpacklo_epi64(low[0], low[1]);
  rows[1] = _mm256_unpackhi_epi64(low[0], low[1]);
  rows[2] = _mm256_unpacklo_epi64(high[0], high[1]);
  rows[3] = _mm256_unpackhi_epi64(high[0], high[1]);
}

// Converts the 16 values in the four lowest bits of bytes.
template <class Out>
VLORA_INLINE void widen_bytes(__m128i bytes, const Factors& factors, Out* out) {
  const auto eight = [&](__m128i some) __attribute__((always_inline)) {
    R weights = factors.offset;
    weights.add_product({_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(some))}, factors.scale);
    return weights;
  };
  eight(bytes).store(out);
  eight(_mm_srli_si128(bytes, 8)).store(out + 8);
}

template <class Out>
VLORA_INLINE void widen_group(__m128i values, const Factors& factors, Out* out) {
  const __m128i low_bits = _mm_set1_epi8(15);
  widen_bytes(_mm_and_si128(values, low_bits), factors, out);
  widen_bytes(_mm_and_si128(_mm_srli_epi16(values, 4), low_bits), factors, out + kGroup / 2);
}

// Writes the weights of rows [from, to) of W, which are whole panels, as fp32 or bf16.
template <class Out>
void widen_panels(const Weight& w, int64_t from, int64_t to, void* out) {
  for (int64_t panel = from / kPanelRows; panel < to / kPanelRows; ++panel) {
    Out* const first = static_cast<Out*>(out) + (panel * kPanelRows - from) * w.k;
    for (int64_t k = 0; k < w.k; k += kGroup) {
      const PanelGroup at = PanelGroup::of(w, panel, k / kGroup);
      __m256i pairs[kPanelRows / 2];
      rows_of_group(at.values, pairs);
      for (int row = 0; row < kPanelRows; ++row) {
        const float zero = kMiddle + (at.zeros ? kZeroStep * float(at.zeros[row]) : 0);
        const Factors factors = Factors::of(at.scales[row], zero);
        const __m256i pair = pairs[row % 4];
        const __m128i values =
            row < 4 ? _mm256_castsi256_si128(pair) : _mm256_extracti128_si256(pair, 1);
        Out* const to_row = first + row * w.k + k;
        if (k + kGroup <= w.k) {
          widen_group(values, factors, to_row);
        } else {
          Out last[kGroup];
          widen_group(values, factors, last);
          std::copy(last, last + (w.k - k), to_row);
        }
      }
    }
  }
}

}  // namespace vlora::quantized::VLORA_ISA

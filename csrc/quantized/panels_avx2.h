// Gemv with int4 weights in panels, and the conversion of such weights in memory.
//
// Each lane of a register belongs to one row of a panel. So values of x are broadcast, and no sum
// of lanes is needed.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "quantized/gemv_quantized.h"

namespace vlora::quantized::VLORA_ISA {

constexpr int kGroup = int(kMinGroup), kWords = 4, kWordValues = 8;
// Bytes of a group of a panel.
constexpr int64_t kGroupBytes = kPanelRows * kGroup / 2;
// Tiles of x. kPanelsAtOnce panels are multiplied with a tile before the next tile is read.
struct PanelTiles {
  static constexpr int kTileRows = 4;
};
// Groups that each panel is prefetched ahead, into L1.
constexpr int64_t kGroupsAhead = 4;
// With one row of x, kMiddle is subtracted from each value of W in a group if this number times the
// largest |x| of the group exceeds the sum of all |x| of the group.
constexpr float kLargestShare = 4;

// Value j of a word of a panel, which has 4 bits, is read in its place: it is masked, kMiddle is
// subtracted in the same place, and x is divided by 16^j when it is packed. So weights are exact.
// The constants are read from memory, because sums and weights need the registers.
struct alignas(32) WordConstants {
  int32_t masks[kWordValues][kPanelRows], middles[kWordValues][kPanelRows];
  constexpr WordConstants() : masks(), middles() {
    for (int j = 0; j < kWordValues; ++j)
      for (int row = 0; row < kPanelRows; ++row) {
        masks[j][row] = int32_t(15u << 4 * j);
        middles[j][row] = int32_t(8u << 4 * j);
      }
  }
};
static_assert(kMiddle == 8);

// Returns the index in its group of value j of a word.
constexpr int value_of_word(int word, int j) { return 4 * word + j / 2 + (j % 2 ? kGroup / 2 : 0); }

// Returns the bit from which value j of a word is read. The highest bits would be read as a
// negative number unless kMiddle is subtracted, so they are shifted.
constexpr int bit_of_value(int j, bool subtract) {
  return j == kWordValues - 1 && !subtract ? 0 : 4 * j;
}

inline int64_t groups_of(const Weight& w) { return w.blocks() * (kBlock / kGroup); }

template <int kPanels, int T>
VLORA_INLINE void set_to_zero(R (&sums)[kPanels][T]) {
#pragma GCC unroll 4
  for (int n = 0; n < kPanels; ++n)
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) sums[n][t] = R::zero();
}

// Packs x by tiles. A tile has, for each group and value of a word, the values of its rows. Then it
// has two numbers for each group and row: minus the sum of the values in units of kZeroStep, and
// the number of units that the products lack because kMiddle was not subtracted.
//
// With one row, kMiddle is subtracted from each value of W only in groups in which one value of x
// is large: the rounding error of its product with kMiddle would be large compared with the other
// products.
inline void pack_panels(const Product& p, void* to) {
  const int64_t groups = groups_of(p.w);
  auto* out = static_cast<float*>(to);
  for (int64_t tile = 0; tile < ceil_div(p.rows, PanelTiles::kTileRows); ++tile) {
    const int64_t begin = tile_begin<PanelTiles>(p.rows, tile),
                  rows = tile_begin<PanelTiles>(p.rows, tile + 1) - begin;
    float* const terms = out + groups * kGroup * rows;
    for (int64_t t = 0; t < rows; ++t) {
      const float* const x = p.x + (begin + t) * p.x_stride;
      for (int64_t group = 0; group < groups; ++group) {
        float values[kGroup] = {}, sum = 0, size = 0, largest = 0;
        const int64_t first = group * kGroup, count = std::min<int64_t>(p.w.k - first, kGroup);
        for (int64_t i = 0; i < count; ++i) values[i] = x[first + i];
        for (const float value : values) {
          sum += value, size += std::abs(value);
          largest = std::max(largest, std::abs(value));
        }
        // False if a value is infinite or not a number.
        const bool even = kLargestShare * largest < size || size == 0;
        const bool subtract = p.rows > 1 || !even;
        float* at = out + group * kGroup * rows + t;
        for (int word = 0; word < kWords; ++word)
          for (int j = 0; j < kWordValues; ++j, at += rows)
            *at = values[value_of_word(word, j)] * (1.0f / float(1 << bit_of_value(j, subtract)));
        float* const of_group = terms + 2 * (group * rows + t);
        of_group[0] = -sum * kZeroStep;
        of_group[1] = subtract ? 0 : kMiddle / kZeroStep;
      }
    }
    out = terms + 2 * groups * rows;
  }
}

// Adds the products of a group of kPanels panels, `panel_bytes` apart, with T packed rows of x.
// subtract: whether kMiddle is subtracted from each value. ahead: bytes to the values to prefetch.
template <bool subtract, int kPanels, int T, int kChains>
VLORA_INLINE void add_group(const uint8_t* values, int64_t panel_bytes, int64_t ahead,
                            const float* x, R (&sums)[kChains][kPanels][T]) {
  static constexpr WordConstants constants;
  for (int word = 0; word < kWords; ++word, values += sizeof(__m256i)) {
    // Otherwise GCC keeps all constants in registers, and the sums in memory.
    const WordConstants* at = &constants;
    asm("" : "+r"(at));
    const auto constant = [](const int32_t (&of)[kPanelRows]) {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(of));
    };
    __m256i words[kPanels];
#pragma GCC unroll 4
    for (int n = 0; n < kPanels; ++n) {
      const uint8_t* const from = values + n * panel_bytes;
      if (word % 2 == 0) __builtin_prefetch(from + ahead, 0, 3);
      words[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
#pragma GCC unroll 8
    for (int j = 0; j < kWordValues; ++j) {
      __m256i mask = constant(at->masks[j]), middle = mask;
      if constexpr (subtract) middle = constant(at->middles[j]);
      // With many panels, load each constant only once.
      if constexpr (kPanels == 4) asm("" : "+x"(mask), "+x"(middle));
      R weights[kPanels];
#pragma GCC unroll 4
      for (int n = 0; n < kPanels; ++n) {
        __m256i value = _mm256_and_si256(words[n], mask);
        if constexpr (subtract)
          value = _mm256_sub_epi32(value, middle);
        else if (bit_of_value(j, subtract) == 0 && j > 0)
          value = _mm256_srli_epi32(words[n], 4 * j);
        weights[n] = {_mm256_cvtepi32_ps(value)};
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const R xs = R::broadcast(x++);
#pragma GCC unroll 4
        for (int n = 0; n < kPanels; ++n) sums[j % kChains][n][t].add_product(weights[n], xs);
      }
    }
  }
}

// Multiplies kPanels panels from `panel` on with a tile of T rows of x, from t0 on.
template <int kPanels, int T>
void multiply_panels(const Product& p, const float* x, int64_t panel, int64_t t0) {
  // Each addition waits for the one before it: few sums are divided into two.
  constexpr int kChains = kPanels * T <= 4 ? 2 : 1;
  const Weight& w = p.w;
  const int64_t groups = groups_of(w), panel_bytes = kPanelRows * w.row_bytes(),
                panel_scales = kPanelRows * w.groups();
  const float* terms = x + groups * kGroup * T;
  const uint8_t* values = w.values + panel * panel_bytes;
  R totals[kPanels][T];
  set_to_zero(totals);
  for (int64_t group = 0; group < groups; ++group) {
    R sums[kChains][kPanels][T];
#pragma GCC unroll 2
    for (int chain = 0; chain < kChains; ++chain) set_to_zero(sums[chain]);
    // After the end of each panel follows the beginning of the panel kPanels further on.
    const bool ends = group + kGroupsAhead >= groups;
    const int64_t ahead = kGroupsAhead * kGroupBytes + (ends ? (kPanels - 1) * panel_bytes : 0);
    constexpr bool kSubtracts = T > 1;  // with one row, it depends on the group of x
    if (!kSubtracts && terms[1] != 0)
      add_group<kSubtracts>(values, panel_bytes, ahead, x, sums);
    else
      add_group<true>(values, panel_bytes, ahead, x, sums);
    const int64_t first = panel * panel_scales + kPanelRows * ((group * kGroup) >> w.group_shift);
#pragma GCC unroll 4
    for (int n = 0; n < kPanels; ++n) {
      const int64_t scale = first + n * panel_scales;
      const int64_t next = scale + kPanelRows * ((kGroupsAhead * kGroup) >> w.group_shift) +
                           (ends ? (kPanels - 1) * panel_scales : 0);
      __builtin_prefetch(w.scales + next, 0, 3);
      if (w.zeros) __builtin_prefetch(w.zeros + next, 0, 3);
      const R scales = R::load(w.scales + scale);
      R zeros = T == 1 ? R::broadcast(terms + 1) : R::zero();
      if (w.zeros) zeros = zeros + load_bytes(w.zeros + scale);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        R sum = sums[0][n][t];
        if constexpr (kChains == 2) sum = sum + sums[1][n][t];
        sum.add_product(zeros, R::broadcast(terms + 2 * t));
        totals[n][t].add_product(sum, scales);
      }
    }
    values += kGroupBytes, x += kGroup * T, terms += 2 * T;
  }
#pragma GCC unroll 4
  for (int n = 0; n < kPanels; ++n) {
    const int64_t output = (panel + n) * kPanelRows;
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const R total = p.bias ? totals[n][t] + R::load(p.bias + output) : totals[n][t];
      total.store(p.y + (t0 + t) * p.y_stride + output);
    }
  }
}

// Multiplies panels [from, to) with a tile of `rows` rows of x, which are at most T.
template <int T>
void multiply_tile(const Product& p, const float* x, int64_t from, int64_t to, int64_t t0,
                   int64_t rows) {
  if (rows < T) {
    if constexpr (T > 1) multiply_tile<T - 1>(p, x, from, to, t0, rows);
    return;
  }
  // With these numbers, the sums keep the multiplication units busy and fit into the registers.
  constexpr int kPanels = T <= 2 ? kPanelsAtOnce : 2;
  for (; from + kPanels <= to; from += kPanels) multiply_panels<kPanels, T>(p, x, from, t0);
  for (; from < to; ++from) multiply_panels<1, T>(p, x, from, t0);
}

inline void gemv_panels(const Product& p, const void* packed, int64_t from, int64_t to) {
  for (int64_t panel = from; panel < to; panel += kPanelsAtOnce) {
    const float* x = static_cast<const float*>(packed);
    for (int64_t tile = 0; tile < ceil_div(p.rows, PanelTiles::kTileRows); ++tile) {
      const int64_t t0 = tile_begin<PanelTiles>(p.rows, tile),
                    rows = tile_begin<PanelTiles>(p.rows, tile + 1) - t0;
      const int64_t last = std::min(to, panel + kPanelsAtOnce);
      multiply_tile<PanelTiles::kTileRows>(p, x, panel, last, t0, rows);
      x += groups_of(p.w) * (kGroup + 2) * rows;
    }
  }
}

// Returns the rows of a group of a panel, rows i and i + 4 in the halves of register i.
VLORA_INLINE void rows_of_group(const uint8_t* p, __m256i (&rows)[kPanelRows / 2]) {
  const auto load = [&](int i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
  };
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
      const int64_t first_scale = kPanelRows * (panel * w.groups() + (k >> w.group_shift));
      __m256i pairs[kPanelRows / 2];
      rows_of_group(w.values + panel * kPanelRows * w.row_bytes() + k / kGroup * kGroupBytes,
                    pairs);
      for (int row = 0; row < kPanelRows; ++row) {
        const int64_t scale = first_scale + row;
        const Factors factors = Factors::of(w.scales[scale], w.zeros ? w.zero(scale) : kMiddle);
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

// Gemv with int8 and int4 weights, which are converted to fp32 or bf16 in registers, and their
// conversion in memory for products with more rows. An unpack header must be included before.
#pragma once

#include "quantized/weight_types.h"
#include "quantized/zeros.h"

namespace vlora::quantized::VLORA_ISA {

// Maximum number of rows of x. For more, weights are widened once to memory.
constexpr int kMaxRows = 16;
// Rows of each stream that are multiplied with a tile before the next tile is read.
constexpr int64_t kRowsAtOnce = 4;
// Bytes that each stream is prefetched ahead, into L1.
constexpr int64_t kPrefetchBytes = 1024;
// Rows of a stream whose scales and zeros are prefetched ahead.
constexpr int64_t kScaleRowsAhead = 2;
// Number of registers that hold the weights of the smallest group. They always share a scale.
constexpr int kGroupSteps = int(kMinGroup) / R::kWidth;

// Returns the first row of x in a tile. Rows are divided evenly into the fewest tiles.
template <class P>
int64_t tile_begin(int64_t rows, int64_t tile) {
  return rows * tile / ceil_div(rows, P::kTileRows);
}

// Packs x by tiles. A tile holds one register of each of its rows after another, so that rows that
// are a power of two apart do not share few sets of L1. Values beyond the depth are zero.
template <class P>
void pack_tiles(const Product& p, void* to) {
  const int64_t depth = p.w.blocks() * kBlock;
  for (int64_t tile = 0; tile < ceil_div(p.rows, P::kTileRows); ++tile) {
    const int64_t begin = tile_begin<P>(p.rows, tile), end = tile_begin<P>(p.rows, tile + 1);
    for (int64_t t = begin; t < end; ++t) {
      const float* const x = p.x + t * p.x_stride;
      auto* out = static_cast<typename P::X*>(to) + begin * depth + (t - begin) * P::kStep;
      int64_t k = 0;
      for (; k + P::kStep <= p.w.k; k += P::kStep, out += (end - begin) * P::kStep)
        P::pack(x + k, out);
      for (; k < depth; k += P::kStep, out += (end - begin) * P::kStep) {
        float last[P::kStep] = {};
        for (int64_t i = 0; k + i < p.w.k && i < P::kStep; ++i) last[i] = x[k + i];
        P::pack(last, out);
      }
    }
  }
}

// Multiplies N rows of W, `gap` rows apart, the first of which is `row`, with a tile of T rows of
// packed x, from t0 on. There is an overload for other packed x (gemv_digits.h).
template <int N, int T, class P>
VLORA_INLINE void gemv_tile(P, const Product& p, const void* packed, int64_t row, int64_t gap,
                            int64_t t0) {
  constexpr int kSteps = int(kMinGroup) / P::kStep;
  // Each addition waits for the one before it: few sums are divided into two.
  constexpr int kChains = N * T <= kStreams ? 2 : 1;
  const Weight& w = p.w;
  const int64_t depth = w.blocks() * kBlock, row_bytes = w.row_bytes(), groups = w.groups();
  const auto* x = static_cast<const typename P::X*>(packed) + t0 * depth;
  const float* const zero_terms =
      w.zeros ? static_cast<const float*>(packed) + p.rows * depth : nullptr;
  const uint8_t* values[N];
  int64_t first_scale[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    values[n] = w.values + (row + n * gap) * row_bytes;
    first_scale[n] = (row + n * gap) * groups;
    if constexpr (P::kGrouped) {
      const int64_t ahead = first_scale[n] + kScaleRowsAhead * groups;
      for (int64_t i = 0; i < groups; i += 16) __builtin_prefetch(w.scales + ahead + i, 0, 3);
      if (w.zeros) __builtin_prefetch(w.zeros + ahead, 0, 3);
    }
  }
  R sums[kChains][N][T];
#pragma GCC unroll 2
  for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[chain][n][t] = R::zero();
  for (int64_t k = 0; k < w.k; k += kBlock) {
    typename P::Block block[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      __builtin_prefetch(values[n] + kPrefetchBytes, 0, 3);
      block[n] = P::load(values[n]);
      values[n] += P::kBlockBytes;
    }
#pragma GCC unroll 2
    for (int part = 0; part < int(kBlock / kMinGroup); ++part) {
      typename P::Scales scales[N];
      if constexpr (P::kGrouped) {
        const int64_t group = (k + part * kMinGroup) >> w.group_shift;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) scales[n] = P::scales(w, first_scale[n] + group);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kSteps; ++i) {
        const int step = part * kSteps + i;
        typename P::Value xs[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t, x += P::kStep) xs[t] = P::load_x(x);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const typename P::Value weights = P::weights(block[n], scales[n], step);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) P::add(sums[step % kChains][n][t], weights, xs[t]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    if constexpr (kChains == 2) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[0][n][t] = sums[0][n][t] + sums[1][n][t];
    }
    if constexpr (P::kGrouped) {
      if (zero_terms != nullptr)
        add_zeros(w, first_scale[n], zero_terms + t0 * zero_terms_stride(w), sums[0][n]);
    }
  }
  float* y = p.y + t0 * p.y_stride + row;
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t, y += p.y_stride) {
    float totals[N];
    if constexpr (N == 4)
      sums_of(sums[0][0][t], sums[0][1][t], sums[0][2][t], sums[0][3][t]).store(totals);
    else
      for (int n = 0; n < N; ++n) totals[n] = sum_of(sums[0][n][t]);
    for (int n = 0; n < N; ++n) {
      if constexpr (!P::kGrouped) totals[n] *= w.scales[row + n * gap];
      y[n * gap] = totals[n] + (p.bias ? p.bias[row + n * gap] : 0);
    }
  }
}

// Multiplies one row of each stream with a tile of `rows` rows of x, which are at most T. If `gap`
// is 0, it multiplies one row of W.
template <class P, int T>
VLORA_INLINE void gemv_rows(const Product& p, const void* packed, int64_t row, int64_t gap,
                            int64_t t0, int64_t rows) {
  if (rows == T) {
    constexpr int N = P::streams(T);
    if (gap == 0) return gemv_tile<1, T>(P{}, p, packed, row, 0, t0);
    for (int n = 0; n < kStreams; n += N) gemv_tile<N, T>(P{}, p, packed, row + n * gap, gap, t0);
    return;
  }
  if constexpr (T > 1) gemv_rows<P, T - 1>(p, packed, row, gap, t0, rows);
}

// Multiplies rows [begin, end) of W, and the rows of the other streams at distance `gap` (none if
// it is 0), with all tiles. The tile loop is outside, so that a tile stays in L1 for all rows.
template <class P>
void gemv_tiles(const Product& p, const void* packed, int64_t begin, int64_t end, int64_t gap) {
  for (int64_t tile = 0; tile < ceil_div(p.rows, P::kTileRows); ++tile) {
    const int64_t t0 = tile_begin<P>(p.rows, tile), t1 = tile_begin<P>(p.rows, tile + 1);
    for (int64_t row = begin; row < end; ++row)
      gemv_rows<P, P::kTileRows>(p, packed, row, gap, t0, t1 - t0);
  }
}

template <class P>
void gemv_of(const Product& p, const void* packed, int64_t from, int64_t to) {
  const int64_t streams = p.w.n / kStreams;
  for (int64_t row = from; row < to; row += kRowsAtOnce)
    gemv_tiles<P>(p, packed, row, std::min(row + kRowsAtOnce, to), streams);
  if (to == streams) gemv_tiles<P>(p, packed, kStreams * streams, p.w.n, 0);
}

// Writes the 64 weights of a block that begins at depth k.
template <class P, class Out>
VLORA_INLINE void widen_block(const Weight& w, const uint8_t* values, int64_t first_scale,
                              int64_t k, Out* out) {
  const typename P::Block block = P::load(values);
#pragma GCC unroll 2
  for (int part = 0; part < int(kBlock / kMinGroup); ++part) {
    const typename P::Scales scales =
        P::scales(w, first_scale + ((k + part * kMinGroup) >> w.group_shift));
#pragma GCC unroll 8
    for (int i = 0; i < kGroupSteps; ++i) {
      const int step = part * kGroupSteps + i;
      P::weights(block, scales, step).store(out + step * R::kWidth);
    }
  }
}

template <class P, class Out>
void widen_rows(const Weight& w, int64_t from, int64_t to, Out* out) {
  for (int64_t row = from; row < to; ++row, out += w.k) {
    const uint8_t* values = w.values + row * w.row_bytes();
    const int64_t first_scale = row * w.groups();
    int64_t k = 0;
    for (; k + kBlock <= w.k; k += kBlock, values += P::kBlockBytes)
      widen_block<P>(w, values, first_scale, k, out + k);
    if (k < w.k) {
      Out last[kBlock];
      widen_block<P>(w, values, first_scale, k, last);
      for (int64_t i = 0; i < w.k - k; ++i) out[k + i] = last[i];
    }
  }
}

template <class Out>
void widen(const Weight& w, int64_t from, int64_t to, void* out) {
  if (w.bits == 4)
    return w.zeros ? widen_rows<Int4<true>>(w, from, to, static_cast<Out*>(out))
                   : widen_rows<Int4<false>>(w, from, to, static_cast<Out*>(out));
  widen_rows<Int8<true>>(w, from, to, static_cast<Out*>(out));
}

inline void pack(const Product& p, void* to) {
  if (p.w.bits == 8) return pack_tiles<Int8<true>>(p, to);
  pack_tiles<Int4<false>>(p, to);
  if (p.w.zeros) pack_zero_terms(p, static_cast<float*>(to) + p.rows * p.w.blocks() * kBlock);
}

inline void gemv(const Product& p, const void* x, int64_t from, int64_t to) {
  if (p.w.bits == 4) return gemv_of<Int4<false>>(p, x, from, to);
  if (p.w.group_shift == Weight::kWholeRow) return gemv_of<Int8<false>>(p, x, from, to);
  gemv_of<Int8<true>>(p, x, from, to);
}

#ifdef VLORA_HAS_BF16_PRODUCTS
inline void pack_pairs(const Product& p, void* to) {
  if (p.w.bits == 8) return pack_tiles<PairsOfInt8<true>>(p, to);
  pack_tiles<PairsOfInt4>(p, to);
  if (p.w.zeros) pack_zero_terms(p, static_cast<float*>(to) + p.rows * p.w.blocks() * kBlock);
}

inline void gemv_pairs(const Product& p, const void* x, int64_t from, int64_t to) {
  if (p.w.bits == 4) return gemv_of<PairsOfInt4>(p, x, from, to);
  if (p.w.group_shift == Weight::kWholeRow) return gemv_of<PairsOfInt8<false>>(p, x, from, to);
  gemv_of<PairsOfInt8<true>>(p, x, from, to);
}
#endif

}  // namespace vlora::quantized::VLORA_ISA

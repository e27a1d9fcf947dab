// A merge's products by a unit that multiplies tiles of bf16 pairs: each factor as three limbs of bf16,
// which together are the fp32 value to the last bit, and of the nine products of limbs the six that fp32 can
// see (what is left out is below 2^-25 of a product of two values). Included after a unit's registers and
// tile_product.h.
#pragma once

#include "atmm/kernels.h"

namespace vlora::atmm::VLORA_ISA {

using runtime::VLORA_ISA::V;
using U = runtime::VLORA_ISA::TileRegisters;

constexpr int kTileFloats = runtime::kTile * kPanel;
constexpr int kBlockFloats = kLimbRows * kLimbColumns;

// What x was, as three numbers of bf16, from the largest down: use(0, …), use(1, …), use(2, …).
template <class Use>
inline __attribute__((always_inline)) void split_limbs(V x, const Use& use) {
  const float minus = -1;
  const V::Scalar less = V::broadcast(&minus);
  for (int limb = 0; limb < kLimbs; ++limb) {
    uint16_t rounded[kPanel];
    x.store(rounded);
    use(limb, rounded);
    x.add_product(less, V::load(rounded));  // exact: what rounding took
  }
}

// Rows of B, `depth` values each, zeros beyond the rank: [limb][row].
inline void limbs_of_rows(const float* b, int64_t rank, int rows, int64_t depth, uint16_t* to) {
  const int64_t limb_size = kLimbRows * depth;
  for (int row = 0; row < kLimbRows; ++row)
    for (int64_t k = 0; k < depth; k += kPanel) {
      const int64_t left = row < rows ? rank - k : 0;
      const float* const from = b + row * rank + k;
      const V x = left >= kPanel ? V::load(from) : left > 0 ? V::load_some(from, int(left)) : V::zero();
      split_limbs(x, [&](int limb, const uint16_t* values) {
        __builtin_memcpy(to + limb * limb_size + row * depth + k, values, sizeof(uint16_t) * kPanel);
      });
    }
}

// Columns of A, in blocks of two panels: [block][limb][chunk of the depth][panel], a tile each, whose lines are
// pairs of depth. Zeros beyond the rank, and beyond the columns of the last block.
inline void limbs_of_columns(const float* a, ptrdiff_t stride, int64_t rank, int64_t columns, int64_t depth,
                             uint16_t* to) {
  const int64_t chunks = depth / kLimbDepth, limb_size = depth * kLimbColumns;
  for (int64_t n = 0; n < columns; n += kPanel) {
    const int64_t count = columns - n;
    const auto row = [&](int64_t k) {
      const float* const from = a + k * stride + n;
      return k >= rank ? V::zero() : count >= kPanel ? V::load(from) : V::load_some(from, int(count));
    };
    uint16_t* const block = to + n / kLimbColumns * kLimbs * limb_size;
    uint16_t* const panel = block + n % kLimbColumns / kPanel * 2 * kTileFloats;
    for (int64_t k = 0; k < depth; k += 2) {
      uint16_t even[kLimbs][kPanel];
      split_limbs(row(k), [&](int limb, const uint16_t* values) {
        __builtin_memcpy(even[limb], values, sizeof even[limb]);
      });
      uint16_t* const line = panel + k / kLimbDepth * 4 * kTileFloats + k % kLimbDepth * kPanel;
      split_limbs(row(k + 1), [&](int limb, const uint16_t* odd) {
        uint32_t pairs[kPanel];
        for (int i = 0; i < kPanel; ++i) pairs[i] = even[limb][i] | uint32_t(odd[i]) << 16;
        __builtin_memcpy(line + limb * limb_size, pairs, sizeof pairs);
      });
    }
    // A block whose second panel lies beyond the columns.
    if (count <= kPanel && n % kLimbColumns == 0)
      for (int64_t i = 0; i < kLimbs * chunks; ++i)
        __builtin_memset(panel + 2 * kTileFloats + i * 4 * kTileFloats, 0, kTileFloats * 4);
  }
}

// (A template: not every V joins.)
template <bool kStream, class Vector, class T>
inline __attribute__((always_inline)) void store_two(T* to, Vector first, Vector second) {
  if constexpr (sizeof(T) == 2 && Vector::kJoins) {
    Vector::store_joined(to, first, second, kStream);
  } else if constexpr (kStream) {
    first.store_past_caches(to);
    second.store_past_caches(to + kPanel);
  } else {
    first.store(to);
    second.store(to + kPanel);
  }
}

// A row of kLimbGroup blocks, whose sums are kBlockFloats apart, or its first `columns`: out = in + sign * sums.
template <class T, bool kStream>
inline __attribute__((always_inline)) void end_row(const float* sums, const T* in, T* out, V::Scalar sign,
                                                   int64_t columns) {
  constexpr int kBlocks = kLimbGroup;
  if (columns >= kBlocks * kLimbColumns) {
#pragma GCC unroll 2
    for (int block = 0; block < kBlocks; ++block, in += kLimbColumns, out += kLimbColumns) {
      V first = V::load(in), second = V::load(in + kPanel);
      first.add_product(sign, V::load(sums + block * kBlockFloats));
      second.add_product(sign, V::load(sums + block * kBlockFloats + kPanel));
      store_two<kStream>(out, first, second);
    }
    return;
  }
  for (int64_t n = 0; n < columns; n += kPanel) {
    const int count = int(columns - n < kPanel ? columns - n : kPanel);
    V sum = V::load_some(in + n, count);
    sum.add_product(sign, V::load(sums + n / kLimbColumns * kBlockFloats + n % kLimbColumns));
    sum.store_some(out + n, count);
  }
}

// Up to 32 rows. Sums go through scratch, two blocks at a time, and are added to W between the products of the
// next two: the unit works on while vectors do. Two lines of a row one after another are what memory takes best
// past the caches (one: 16.6 ms for 10.6, two threads, rank 16, bf16; four push the factors out of L1).
template <class T, bool kStream>
void merge_limbs(const LimbRows& p) {
  alignas(64) static thread_local float sums[2][kLimbGroup * kBlockFloats];
  constexpr int64_t kColumns = kLimbGroup * kLimbColumns;
  constexpr int kTurns = 6;  // products of limbs
  const int64_t chunks = p.depth / kLimbDepth;
  const int64_t left_limb = kLimbRows * p.depth, right_limb = p.depth * kLimbColumns;
  const ptrdiff_t left_bytes = p.depth * 2;
  const V::Scalar sign = V::broadcast(&p.sign);
  const T* in = static_cast<const T*>(p.in);
  T* out = static_cast<T*>(p.out);
  const uint16_t* right = p.right;
  const T* next = static_cast<const T*>(p.next);
  int64_t fetched = 0;  // columns of a row of `next`
  runtime::VLORA_ISA::configure(runtime::kTile, runtime::kTile, runtime::kTile);
  int64_t ready = 0;  // columns whose sums are in scratch
  for (int64_t at = 0, turn = 0; at < p.columns || ready; ++turn) {
    const float* const before = sums[turn % 2 ^ 1];
    int done = 0;  // rows of them that are added
    const auto add_to = [&](int rows) {
      for (; done < rows; ++done) {
        end_row<T, kStream>(before + done * kLimbColumns, in + done * p.stride, out + done * p.stride, sign,
                            ready);
        if (!next) continue;
        // As much of the rows that come next, from end to end, to L2.
        for (int64_t n = 0; n < kColumns; n += 64 / int64_t(sizeof(T)))
          __builtin_prefetch(next + fetched + n, 0, 2);
        fetched += kColumns;
        if (fetched >= p.columns) next += p.stride, fetched = 0;
      }
    };
    const int64_t here = p.columns - at < kColumns ? p.columns - at : kColumns;
    const int blocks = int((here + kLimbColumns - 1) / kLimbColumns);
    const int turns = int(chunks) * kTurns * blocks;
    int step = 0;
    const auto left = [&](int limb, int64_t chunk) {
      const uint16_t* const from = p.left + limb * left_limb + chunk * kLimbDepth;
      U::load<4>(from, left_bytes);
      U::load<5>(from + runtime::kTile * p.depth, left_bytes);
    };
    const auto columns = [&](int limb, int64_t chunk) {
      const uint16_t* const from = right + limb * right_limb + chunk * 4 * kTileFloats;
      U::load<6>(from, 64);
      U::load<7>(from + 2 * kTileFloats, 64);
    };
    const auto multiply = [&] {
      U::multiply<0, 4, 6>();
      U::multiply<1, 4, 7>();
      U::multiply<2, 5, 6>();
      U::multiply<3, 5, 7>();
      if (ready) add_to(p.rows * ++step / turns);
    };
    for (int block = 0; block < blocks; ++block, right += kLimbs * right_limb) {
      U::zero<0>(), U::zero<1>(), U::zero<2>(), U::zero<3>();
      // What is small first, so that the sum is rounded as often as fp32's would be; and in an order in which
      // few limbs are loaded.
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        left(2, chunk), columns(0, chunk), multiply();
        left(0, chunk), columns(2, chunk), multiply();
        columns(1, chunk), multiply();
        left(1, chunk), multiply();
        columns(0, chunk), multiply();
      }
      for (int64_t chunk = 0; chunk < chunks; ++chunk) left(0, chunk), columns(0, chunk), multiply();
      float* const to = sums[turn % 2] + block * kBlockFloats;
      U::store<0>(to, kLimbColumns * 4);
      U::store<1>(to + kPanel, kLimbColumns * 4);
      U::store<2>(to + runtime::kTile * kLimbColumns, kLimbColumns * 4);
      U::store<3>(to + runtime::kTile * kLimbColumns + kPanel, kLimbColumns * 4);
    }
    if (ready) {
      add_to(p.rows);  // after the last products: all of them
      in += ready;
      out += ready;
    }
    at += here;
    ready = here;
  }
}

}  // namespace vlora::atmm::VLORA_ISA

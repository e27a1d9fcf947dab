// The products of a merge on a tile unit, with both factors split into limbs
// (runtime/fp32_limbs.h). Included after the unit's tile registers and runtime/tile_product.h.
#pragma once

#include "atmm/kernels.h"
#include "runtime/fp32_limbs.h"

namespace vlora::atmm::VLORA_ISA {

namespace isa = runtime::VLORA_ISA;
using isa::V;
using Block = isa::TileBlock<2, 2>;

constexpr int64_t kTileBytes = runtime::kAmxRows * 64;
constexpr int kBlockFloats = kLimbRows * kLimbColumns;
// Number of products of limbs per chunk of the depth. A chunk is one tile deep.
constexpr int kLimbProducts = 6;

// Splits rows of B, `rank` values each, into [limb][row][depth]. Values from `rank` on are zero.
inline void limbs_of_rows(const float* b, int64_t rank, int rows, int64_t depth, uint16_t* to) {
  const int64_t limb_bytes = kLimbRows * depth * 2;
  for (int row = 0; row < kLimbRows; ++row)
    for (int64_t k = 0; k < depth; k += kLimbDepth) {
      const auto values =
          isa::Fp32Line::load_some(b + row * rank + k, row < rows ? int(rank - k) : 0);
      isa::store_limbs(isa::split_rounded(values), reinterpret_cast<char*>(to + row * depth + k),
                       limb_bytes);
    }
}

// Splits columns of A, in blocks of two panels, into [block][limb][chunk of the depth][panel]. Each
// element is a tile, whose lines are pairs of depth. Values from `rank` on, and columns of a block
// beyond the last one, are zero.
inline void limbs_of_columns(const float* a, ptrdiff_t stride, int64_t rank, int64_t columns,
                             int64_t depth, uint16_t* to) {
  const int64_t chunks = depth / kLimbDepth, limb_bytes = depth * kLimbColumns * 2;
  for (int64_t n = 0; n < columns; n += kPanel) {
    const int count = int(columns - n < kPanel ? columns - n : kPanel);
    char* const block = reinterpret_cast<char*>(to) + n / kLimbColumns * kLimbs * limb_bytes;
    char* const panel = block + n % kLimbColumns / kPanel * kTileBytes;
    for (int64_t k = 0; k < depth; k += 2) {
      const float* const row = a + k * stride + n;
      const auto values = isa::Fp32Line::load_two(row, k < rank ? count : 0, row + stride,
                                                  k + 1 < rank ? count : 0);
      const auto limbs = isa::split_rounded(values);
      char* const line = panel + k / kLimbDepth * 2 * kTileBytes + k % kLimbDepth / 2 * 64;
      for (int i = 0; i < kLimbs; ++i) limbs.line[i].interleaved().store(line + i * limb_bytes);
    }
    // The second panel of the last block may lie beyond the columns.
    if (n + kPanel >= columns && n % kLimbColumns == 0)
      for (int64_t i = 0; i < kLimbs * chunks; ++i)
        __builtin_memset(panel + kTileBytes + i * 2 * kTileBytes, 0, kTileBytes);
  }
}

// out = in + sign * sums, for one row of kLimbGroup blocks or its first `columns` columns. The sums
// of the blocks are kBlockFloats apart.
template <class T, bool kStream>
VLORA_INLINE void add_row(const float* sums, const T* in, T* out, V::Scalar sign, int64_t columns) {
  constexpr int kBlocks = kLimbGroup;
  if (columns >= kBlocks * kLimbColumns) {
#pragma GCC unroll 2
    for (int block = 0; block < kBlocks; ++block, in += kLimbColumns, out += kLimbColumns) {
      V first = V::load(in), second = V::load(in + kPanel);
      first.add_product(sign, V::load(sums + block * kBlockFloats));
      second.add_product(sign, V::load(sums + block * kBlockFloats + kPanel));
      if constexpr (sizeof(T) == 2) {
        V::store_two(out, first, second, kStream);
      } else if constexpr (kStream) {
        first.stream(out);
        second.stream(out + kPanel);
      } else {
        first.store(out);
        second.store(out + kPanel);
      }
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

// Merges up to 32 rows. The sums of two blocks go through scratch. They are added to W between the
// products of the next two blocks, so that tile unit and vectors work at the same time. Two blocks
// make two cache lines of a row, which memory accepts best as streaming stores: with one block at a
// time, a merge takes 16.6 ms instead of 10.6 ms (two threads, rank 16, bf16). Four blocks would
// evict the factors from L1.
template <class T, bool kStream>
void merge_limbs(const LimbRows& p) {
  alignas(64) static thread_local float sums[2][kLimbGroup * kBlockFloats];
  constexpr int64_t kColumns = kLimbGroup * kLimbColumns;
  const int64_t chunks = p.depth / kLimbDepth;
  const int64_t left_limb = kLimbRows * p.depth * 2,
                right_limb = p.depth * kLimbColumns * 2;  // bytes
  const ptrdiff_t left_line = p.depth * 2;
  const V::Scalar sign = V::broadcast(&p.sign);
  const T* in = static_cast<const T*>(p.in);
  T* out = static_cast<T*>(p.out);
  const char* const rows = reinterpret_cast<const char*>(p.left);
  const char* right = reinterpret_cast<const char*>(p.right);
  const T* next = static_cast<const T*>(p.next);
  int64_t prefetched = 0;  // number of prefetched columns of a row of `next`
  isa::configure(runtime::kAmxRows, runtime::kAmxRows, runtime::kAmxRows);
  int64_t ready = 0;  // number of columns whose sums are in scratch
  for (int64_t column = 0, group = 0; column < p.columns || ready; ++group) {
    const float* const ready_sums = sums[group % 2 ^ 1];
    int added = 0;  // number of rows of `ready_sums` that have been added
    const auto add_rows = [&](int until) {
      for (; added < until; ++added) {
        add_row<T, kStream>(ready_sums + added * kLimbColumns, in + added * p.stride,
                            out + added * p.stride, sign, ready);
        if (!next) continue;
        // Prefetches an equal part of the next rows to L2.
        for (int64_t n = 0; n < kColumns; n += 64 / int64_t(sizeof(T)))
          __builtin_prefetch(next + prefetched + n, 0, 2);
        prefetched += kColumns;
        if (prefetched >= p.columns) next += p.stride, prefetched = 0;
      }
    };
    const int64_t columns = p.columns - column < kColumns ? p.columns - column : kColumns;
    const int blocks = int((columns + kLimbColumns - 1) / kLimbColumns);
    const int products = int(chunks) * kLimbProducts * blocks;
    int done = 0;
    const auto load_left = [&](int limb, int64_t chunk) {
      Block::load_left(rows + limb * left_limb + chunk * kLimbDepth * 2, left_line,
                       runtime::kAmxRows * left_line);
    };
    const auto load_right = [&](int limb, int64_t chunk) {
      Block::load_right(right + limb * right_limb + chunk * 2 * kTileBytes, 64, kTileBytes);
    };
    const auto multiply = [&] {
      Block::multiply();
      if (ready) add_rows(p.rows * ++done / products);
    };
    for (int block = 0; block < blocks; ++block, right += kLimbs * right_limb) {
      Block::zero();
      // Small products come first, so that the sum is rounded as often as an fp32 sum. Among those
      // of equal size, the order needs few loads. (A gemm orders all of them by loads:
      // gemm/gemm_amx_limbs.h.)
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        load_left(2, chunk), load_right(0, chunk), multiply();
        load_left(0, chunk), load_right(2, chunk), multiply();
        load_right(1, chunk), multiply();
        load_left(1, chunk), multiply();
        load_right(0, chunk), multiply();
      }
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        load_left(0, chunk), load_right(0, chunk), multiply();
      Block::store(sums[group % 2] + block * kBlockFloats, kLimbColumns);
    }
    if (ready) {
      add_rows(p.rows);  // the rows that remain
      in += ready;
      out += ready;
    }
    column += columns;
    ready = columns;
  }
}

}  // namespace vlora::atmm::VLORA_ISA

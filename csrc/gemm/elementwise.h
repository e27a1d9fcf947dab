// Row-by-row operations before the layers and between the products of a layer.
#pragma once

#include <cmath>
#include <cstring>

#include "gemm/gated.h"
#include "gemm/gemm.h"
#include "runtime/bf16.h"

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Loads the last `count` values of a row, which do not fill a register, and zeros.
VLORA_INLINE R load_rest(const float* p, int64_t count) {
  float values[R::kWidth] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = p[i];
  return R::load(values);
}

VLORA_INLINE void store_rest(R r, float* p, int64_t count) {
  float values[R::kWidth];
  r.store(values);
  for (int64_t i = 0; i < count; ++i) p[i] = values[i];
}

inline void embed(const Embedding& e, int64_t from, int64_t until) {
  for (int64_t row = from; row < until; ++row) {
    float* const out = e.out + row * e.width;
    if (const int64_t replacement = e.replacements ? e.replacements[row] : 0) {
      std::memcpy(out, reinterpret_cast<const float*>(replacement), size_t(e.width) * 4);
    } else if (e.dtype == Dtype::kFp32) {
      std::memcpy(out, static_cast<const float*>(e.table) + e.tokens[row] * e.width,
                  size_t(e.width) * 4);
    } else {
      const uint16_t* const word = static_cast<const uint16_t*>(e.table) + e.tokens[row] * e.width;
      int64_t i = 0;
      for (; i + R::kWidth <= e.width; i += R::kWidth) R::load(word + i).store(out + i);
      for (; i < e.width; ++i) out[i] = fp32_of(word[i]);
    }
  }
}

inline void add_norm(const Norm& n, int64_t from, int64_t until) {
  const int64_t full = n.width / R::kWidth * R::kWidth;
  for (int64_t row = from; row < until; ++row) {
    float* const hidden = n.hidden + row * n.width;
    const float* const delta = n.delta ? n.delta + row * n.width : nullptr;
    float* const out = n.out + row * n.width;
    // Four independent sums, because each addition waits for the one before it.
    R squares[4] = {R::zero(), R::zero(), R::zero(), R::zero()};
    for (int64_t i = 0, chain = 0; i < n.width; i += R::kWidth, chain = (chain + 1) % 4) {
      const bool rest = i >= full;
      R x = rest ? load_rest(hidden + i, n.width - i) : R::load(hidden + i);
      if (delta) {
        x = x + (rest ? load_rest(delta + i, n.width - i) : R::load(delta + i));
        if (rest) {
          store_rest(x, hidden + i, n.width - i);
        } else {
          x.store(hidden + i);
        }
      }
      squares[chain].add_product(x, x);
    }
    const float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float factor = 1 / std::sqrt(sum / float(n.width) + n.eps);
    const R factors = R::all(factor);
    int64_t i = 0;
    for (; i < full; i += R::kWidth)
      (R::load(hidden + i) * factors * R::load(n.weight + i)).store(out + i);
    for (; i < n.width; ++i) out[i] = hidden[i] * factor * n.weight[i];
  }
}

inline void gate(const Gate& g, int64_t from, int64_t until) {
  for (int64_t row = from; row < until; ++row) {
    const float* const gates = g.x + row * 2 * g.width;
    const float* const ups = gates + g.width;
    float* const out = g.out + row * g.width;
    int64_t i = 0;
    for (; i + R::kWidth <= g.width; i += R::kWidth)
      gated(R::load(gates + i), R::load(ups + i)).store(out + i);
    if (i < g.width) {
      const int64_t rest = g.width - i;
      store_rest(gated(load_rest(gates + i, rest), load_rest(ups + i, rest)), out + i, rest);
    }
  }
}

// Finds the block with the largest value, then the value in it.
inline void argmax(const Argmax& a, int64_t from, int64_t until) {
  constexpr int64_t kBlock = 64 * R::kWidth;
  for (int64_t row = from; row < until; ++row) {
    const float* const x = a.x + row * a.width;
    // x - x is NaN if x is not finite, and a sum that contains NaN is NaN.
    R check = R::zero();
    float largest = -INFINITY;
    int64_t largest_block = 0;
    for (int64_t block = 0; block < a.width; block += kBlock) {
      const int64_t end = block + kBlock < a.width ? block + kBlock : a.width;
      R high = R::all(-INFINITY);
      int64_t i = block;
      for (; i + R::kWidth <= end; i += R::kWidth) {
        const R values = R::load(x + i);
        high = max(high, values);
        check = check + (values - values);
      }
      float block_largest = high.largest();
      for (; i < end; ++i) {
        block_largest = x[i] > block_largest ? x[i] : block_largest;
        check = check + R::all(x[i] - x[i]);
      }
      if (block_largest > largest) {
        largest = block_largest;
        largest_block = block;
      }
    }
    int64_t index = largest_block;
    while (index + 1 < a.width && !(x[index] == largest)) ++index;
    a.index[row] = index;
    a.finite[row] = sum_of(check) == 0;
  }
}

}  // namespace vlora::gemm::VLORA_ISA

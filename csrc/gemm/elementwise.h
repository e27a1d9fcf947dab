// What lies before the layers and between the products of one, row by row.
#pragma once

#include <cmath>
#include <cstring>

#include "gemm/gated.h"
#include "gemm/gemm.h"

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Values [from, count) that do not fill a register, padded with zeros.
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
    const int64_t instead = e.instead ? e.instead[row] : 0;
    if (instead || e.dtype == Dtype::kFp32) {
      const float* const word = static_cast<const float*>(e.table) + (instead ? 0 : e.tokens[row] * e.width);
      std::memcpy(out, instead ? reinterpret_cast<const float*>(instead) : word, size_t(e.width) * 4);
      continue;
    }
    const uint16_t* const word = static_cast<const uint16_t*>(e.table) + e.tokens[row] * e.width;
    int64_t i = 0;
    for (; i + R::kWidth <= e.width; i += R::kWidth) R::load(word + i).store(out + i);
    for (; i < e.width; ++i) {
      const uint32_t bits = uint32_t(word[i]) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  }
}

inline void add_norm(const Norm& n, int64_t from, int64_t until) {
  const int64_t whole = n.width / R::kWidth * R::kWidth;
  for (int64_t row = from; row < until; ++row) {
    float* const hidden = n.hidden + row * n.width;
    const float* const delta = n.delta ? n.delta + row * n.width : nullptr;
    float* const out = n.out + row * n.width;
    R squares[4] = {R::zero(), R::zero(), R::zero(), R::zero()};
    for (int64_t i = 0, turn = 0; i < n.width; i += R::kWidth, turn = (turn + 1) % 4) {
      const bool rest = i >= whole;
      R x = rest ? load_rest(hidden + i, n.width - i) : R::load(hidden + i);
      if (delta) {
        x = x + (rest ? load_rest(delta + i, n.width - i) : R::load(delta + i));
        if (rest) {
          store_rest(x, hidden + i, n.width - i);
        } else {
          x.store(hidden + i);
        }
      }
      squares[turn].add_product(x, x);
    }
    const float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float factor = 1 / std::sqrt(sum / float(n.width) + n.eps);
    const R factors = R::all(factor);
    int64_t i = 0;
    for (; i < whole; i += R::kWidth)
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

inline void largest(const Largest& l, int64_t from, int64_t until) {
  constexpr int64_t kBlock = 64 * R::kWidth;
  for (int64_t row = from; row < until; ++row) {
    const float* const x = l.x + row * l.width;
    // Differences of what is not finite with itself are NaN, and stay so in their sum.
    R odd = R::zero();
    float most = -INFINITY;
    int64_t begin = 0;
    for (int64_t block = 0; block < l.width; block += kBlock) {
      const int64_t until_here = block + kBlock < l.width ? block + kBlock : l.width;
      R high = R::all(-INFINITY);
      int64_t i = block;
      for (; i + R::kWidth <= until_here; i += R::kWidth) {
        const R values = R::load(x + i);
        high = max(high, values);
        odd = odd + (values - values);
      }
      float here = high.largest();
      for (; i < until_here; ++i) {
        here = x[i] > here ? x[i] : here;
        odd = odd + R::all(x[i] - x[i]);
      }
      if (here > most) {
        most = here;
        begin = block;
      }
    }
    int64_t at = begin;
    while (at + 1 < l.width && !(x[at] == most)) ++at;
    l.at[row] = at;
    l.finite[row] = sum_of(odd) == 0;
  }
}

}  // namespace vlora::gemm::VLORA_ISA

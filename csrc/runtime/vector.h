// Sixteen fp32 values (kLanes) in as many registers of an instruction set as they need. Included
// after its register header.
#pragma once

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

// This is a template, so that functions that an instruction set does not use are not instantiated.
template <class R>
struct VectorOf {
  using V = VectorOf;
  static constexpr int kRegisters = kLanes / R::kWidth;
  // Whether a vector is one register. Two vectors of bf16 then make a cache line.
  static constexpr bool kFullLines = kRegisters == 1;

  R r[kRegisters];
  using Scalar = R;

  static VLORA_INLINE V zero() {
    return each([](int) __attribute__((always_inline)) { return R::zero(); });
  }
  template <class T>
  static VLORA_INLINE V load(const T* p) {
    return each([&](int i) __attribute__((always_inline)) { return R::load(p + i * R::kWidth); });
  }
  // Loads `count` values, fewer than 16, and fills the other lanes with zeros.
  template <class T>
  static VLORA_INLINE V load_some(const T* p, int count) {
    if constexpr (kFullLines) return {R::load_some(p, count)};
    T values[kLanes] = {};
    for (int i = 0; i < count; ++i) values[i] = p[i];
    return load(values);
  }
  // Loads the first (odd = 0) or the second value of each of 16 pairs of bf16.
  static VLORA_INLINE V load_half_of_pairs(const char* p, int odd) {
    const auto* pairs = reinterpret_cast<const uint16_t*>(p);
    return each([&](int i) __attribute__((always_inline)) {
      return odd ? R::odd(pairs + 2 * i * R::kWidth) : R::even(pairs + 2 * i * R::kWidth);
    });
  }
  // Loads 16 bf16 values: those with even indices, then those with odd ones.
  static VLORA_INLINE V load_deinterleaved(const uint16_t* p) {
    constexpr int kHalf = kRegisters / 2;
    return each([&](int i) __attribute__((always_inline)) {
      return i < kHalf ? R::even(p + 2 * i * R::kWidth) : R::odd(p + 2 * (i - kHalf) * R::kWidth);
    });
  }
  static VLORA_INLINE Scalar broadcast(const float* p) { return R::broadcast(p); }
  // Repeats p[0], p[1].
  static VLORA_INLINE Scalar broadcast_two(const float* p) { return R::broadcast_two(p); }
  // Repeats p[odd], p[2 + odd].
  static VLORA_INLINE Scalar broadcast_two_of_four(const float* p, int odd) {
    return R::broadcast_two_of_four(p, odd);
  }

  VLORA_INLINE void add_product(Scalar s, const V& b) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) r[i].add_product(s, b.r[i]);
  }
  VLORA_INLINE void add(const V& b) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) r[i] = r[i] + b.r[i];
  }

  VLORA_INLINE void store(float* p) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) r[i].store(p + i * R::kWidth);
  }
  // Rounds to the nearest bf16, ties to even. A NaN keeps its sign and stays a NaN.
  VLORA_INLINE void store(uint16_t* p) const {
    if constexpr (kFullLines) {
      r[0].store(p);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; i += 2) R::store_two(r[i], r[i + 1], p + i * R::kWidth);
    }
  }
  template <class T>
  VLORA_INLINE void store_some(T* p, int count) const {
    if constexpr (kFullLines) {
      r[0].store_some(p, count);
    } else {
      T values[kLanes];
      store(values);
      for (int i = 0; i < count; ++i) p[i] = values[i];
    }
  }
  // Stores the sum of each pair of neighbours: 8 values.
  VLORA_INLINE void store_pair_sums(float* p) const { R::store_pair_sums(r, p); }
  // Stores that bypass the caches. p is aligned to 64 bytes, for bf16 to 32 bytes.
  VLORA_INLINE void stream(float* p) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) r[i].stream(p + i * R::kWidth);
  }
  VLORA_INLINE void stream(uint16_t* p) const {
    if constexpr (kFullLines) {
      r[0].stream(p);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; i += 2) R::stream_two(r[i], r[i + 1], p + i * R::kWidth);
    }
  }
  // Stores two vectors as 32 contiguous bf16, by one store if kFullLines.
  static VLORA_INLINE void store_two(uint16_t* p, const V& a, const V& b, bool streaming) {
    if constexpr (kFullLines) {
      streaming ? R::stream_two(a.r[0], b.r[0], p) : R::store_two(a.r[0], b.r[0], p);
    } else {
      streaming ? a.stream(p) : a.store(p);
      streaming ? b.stream(p + kLanes) : b.store(p + kLanes);
    }
  }
  // The inverse of load_deinterleaved, rounded as in `store`. A NaN must be a quiet one, which
  // results of arithmetic are.
  VLORA_INLINE void store_interleaved(uint16_t* p) const {
    constexpr int kHalf = kRegisters / 2;
#pragma GCC unroll 4
    for (int i = 0; i < kHalf; ++i) R::store_interleaved(r[i], r[kHalf + i], p + 2 * i * R::kWidth);
  }

#ifdef VLORA_HAS_BF16_PRODUCTS
  // 16 pairs of bf16.
  struct Pairs {
    typename R::Pairs r[kRegisters];
  };
  static VLORA_INLINE Pairs load_pairs(const char* p) {
    Pairs pairs;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i)
      pairs.r[i] = R::load_pairs(reinterpret_cast<const uint16_t*>(p) + 2 * i * R::kWidth);
    return pairs;
  }
  static VLORA_INLINE Pairs broadcast_pair(const void* p) {
    return repeated(R::broadcast_pair(static_cast<const uint16_t*>(p)));
  }
  // Repeats two pairs.
  static VLORA_INLINE Pairs broadcast_two_pairs(const void* p) {
    return repeated(R::broadcast_two_pairs(static_cast<const uint16_t*>(p)));
  }
  VLORA_INLINE void add_pairs(const Pairs& s, const Pairs& b) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) r[i].add_pairs(s.r[i], b.r[i]);
  }
#endif

  // Keeps the compiler from removing or reordering the computation of the vector, in
  // microbenchmarks.
  VLORA_INLINE void keep() {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) r[i].keep();
  }
  VLORA_INLINE float sum() const {
    float total = 0;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) total += r[i].folded().sum();
    return total;
  }

 private:
  template <class Make>
  static VLORA_INLINE V each(const Make& make) {
    V v;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) v.r[i] = make(i);
    return v;
  }
#ifdef VLORA_HAS_BF16_PRODUCTS
  static VLORA_INLINE Pairs repeated(typename R::Pairs pair) {
    Pairs pairs;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) pairs.r[i] = pair;
    return pairs;
  }
#endif
};

using V = VectorOf<R>;

}  // namespace vlora::runtime::VLORA_ISA

// Sixteen fp32 values in plain C++, for any CPU. Only portable, not fast.
#pragma once

#include "runtime/types.h"

namespace vlora::runtime::VLORA_ISA {

struct V {
  float v[kLanes];
  using Scalar = float;

  static V zero() { return {}; }
  template <class T>
  static V load(const T* p) {
    return load_some(p, kLanes);
  }
  template <class T>
  static V load_some(const T* p, int count) {
    V result = {};
    for (int i = 0; i < count; ++i) result.v[i] = widen(p[i]);
    return result;
  }
  static V load_half_of_pairs(const char* p, int odd) {
    V result;
    for (int i = 0; i < kLanes; ++i) {
      uint16_t bf16;
      __builtin_memcpy(&bf16, p + 4 * i + 2 * odd, sizeof bf16);
      result.v[i] = widen(bf16);
    }
    return result;
  }
  // Of 16 bf16 values those at even places, then those at odd ones.
  static V load_apart(const uint16_t* p) {
    V result;
    for (int i = 0; i < kLanes; ++i) result.v[i % 2 * (kLanes / 2) + i / 2] = widen(p[i]);
    return result;
  }
  static Scalar broadcast(const float* p) { return *p; }
  // p[0] and p[1], and of four p[odd] and p[2 + odd], in turn.
  struct Two {
    float v[2];
  };
  static Two two(const float* p) { return {{p[0], p[1]}}; }
  static Two two_of_four(const float* p, int odd) { return {{p[odd], p[2 + odd]}}; }

  void add_product(Scalar s, const V& b) {
    for (int i = 0; i < kLanes; ++i) v[i] += s * b.v[i];
  }
  void add_product(Two s, const V& b) {
    for (int i = 0; i < kLanes; ++i) v[i] += s.v[i % 2] * b.v[i];
  }
  void add(const V& b) {
    for (int i = 0; i < kLanes; ++i) v[i] += b.v[i];
  }

#ifdef VLORA_HAS_BF16_PRODUCTS
  // The twin of vdpbf16ps: sixteen pairs.
  struct Pairs {
    float even[kLanes], odd[kLanes];
  };
  static Pairs load_pairs(const char* p) { return repeated(p, kLanes); }
  static Pairs broadcast_pair(const void* p) { return repeated(p, 1); }
  static Pairs two_pairs(const void* p) { return repeated(p, 2); }
  void add_pairs(const Pairs& s, const Pairs& b) {
    for (int i = 0; i < kLanes; ++i)
      v[i] += s.even[i] * b.even[i] + s.odd[i] * b.odd[i];
  }
#endif

  template <class T>
  void store(T* p) const {
    store_some(p, kLanes);
  }
  void store_some(float* p, int count) const {
    for (int i = 0; i < count; ++i) p[i] = v[i];
  }
  void store_some(uint16_t* p, int count) const {
    for (int i = 0; i < count; ++i) p[i] = rounded(v[i]);
  }
  // The sum of each two neighbours.
  void store_sums_of_two(float* p) const {
    for (int i = 0; i < kLanes / 2; ++i) p[i] = v[2 * i] + v[2 * i + 1];
  }
  static constexpr bool kJoins = false;  // two registers of bf16 are one line
  template <class T>
  void store_past_caches(T* p) const {
    store(p);
  }
  // The other way round.
  void store_together(uint16_t* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = rounded(v[i % 2 * (kLanes / 2) + i / 2]);
  }

 private:
#ifdef VLORA_HAS_BF16_PRODUCTS
  static Pairs repeated(const void* p, int count) {
    uint16_t bf16[2 * kLanes];
    __builtin_memcpy(bf16, p, size_t(count) * 4);
    Pairs result;
    for (int i = 0; i < kLanes; ++i) {
      result.even[i] = widen(bf16[i % count * 2]);
      result.odd[i] = widen(bf16[i % count * 2 + 1]);
    }
    return result;
  }
#endif
  static float widen(float value) { return value; }
  static float widen(uint16_t bf16) {
    const uint32_t bits = uint32_t(bf16) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
  static uint16_t rounded(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    if (value != value) return uint16_t((bits | 0x00400000u) >> 16);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

inline float sum_of(const V& v) {
  float sum = 0;
  for (float value : v.v) sum += value;
  return sum;
}

}  // namespace vlora::runtime::VLORA_ISA

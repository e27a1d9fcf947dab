// The one way to multiply tiles, for a unit with eight registers of 16 lines of 64 bytes. Included
// after a unit (tile_amx.h, tile_twin.h), in whose namespace all of it lies.
#pragma once

#include <type_traits>

#include "runtime/tile_unit.h"

namespace vlora::runtime::VLORA_ISA {

// Shapes of the unit's registers, as LDTILECFG reads them.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a line
  uint8_t rows[16] = {};
};

// Sums in 0 … 3, two of left in 4 and 5, two of right in 6 and 7.
struct Configured {
  int upper = 0, lower = 0, steps = 0;  // rows of both tiles of left, steps that they take
};
inline thread_local Configured configured;

inline void configure(int upper, int lower, int steps) {
  if (configured.upper == upper && configured.lower == lower && configured.steps == steps) return;
  configured = {upper, lower, steps};
  Shapes s;
  for (int t = 0; t < 4; ++t) {
    s.rows[t] = uint8_t(t < 2 ? upper : lower);
    s.bytes[t] = kTile * 4;
  }
  for (int t = 4; t < 6; ++t) {
    s.rows[t] = uint8_t(t == 4 ? upper : lower);
    s.bytes[t] = uint16_t(4 * steps);
    s.rows[t + 2] = uint8_t(steps);
    s.bytes[t + 2] = kTile * 4;
  }
  // A tile without rows is not used; the unit wants it to have none in either direction.
  for (int t : {2, 3, 5})
    if (lower == 0) s.rows[t] = 0, s.bytes[t] = 0;
  TileRegisters::configure(s);
}

template <int T>
using At = std::integral_constant<int, T>;

// Chunks of `steps` steps each. kLower, kSecond: there is a second tile of left, a second panel.
template <bool kLower, bool kSecond>
void chunks(const TileProduct& p, const char* left, const char* right, int64_t count, int steps,
            bool first) {
  using U = TileRegisters;
  float* const lower_out = p.out + kTile * p.out_stride;
  const ptrdiff_t out_bytes = p.out_stride * 4;
  const auto begin = [&](auto tile, const float* from) {
    if (first)
      U::zero<tile.value>();
    else
      U::load<tile.value>(from, out_bytes);
  };
  begin(At<0>{}, p.out);
  if constexpr (kSecond) begin(At<1>{}, p.out + kTile);
  if constexpr (kLower) begin(At<2>{}, lower_out);
  if constexpr (kLower && kSecond) begin(At<3>{}, lower_out + kTile);
  for (; count > 0; --count, left += 4 * steps, right += steps * p.step_bytes) {
    U::load<4>(left, p.left_bytes);
    U::load<6>(right, p.step_bytes);
    U::multiply<0, 4, 6>();
    if constexpr (kSecond) {
      U::load<7>(right + p.panel_bytes, p.step_bytes);
      U::multiply<1, 4, 7>();
    }
    if constexpr (kLower) {
      U::load<5>(left + kTile * p.left_bytes, p.left_bytes);
      U::multiply<2, 5, 6>();
    }
    if constexpr (kLower && kSecond) U::multiply<3, 5, 7>();
  }
  U::store<0>(p.out, out_bytes);
  if constexpr (kSecond) U::store<1>(p.out + kTile, out_bytes);
  if constexpr (kLower) U::store<2>(lower_out, out_bytes);
  if constexpr (kLower && kSecond) U::store<3>(lower_out + kTile, out_bytes);
}

inline void multiply_tiles(const TileProduct& p) {
  const int upper = p.rows < kTile ? p.rows : kTile, lower = p.rows - upper;
  const auto run = lower ? p.panels > 1 ? chunks<true, true> : chunks<true, false>
                         : p.panels > 1 ? chunks<false, true> : chunks<false, false>;
  const char* left = static_cast<const char*>(p.left);
  const char* right = static_cast<const char*>(p.right);
  const int64_t whole = p.steps / kTile, rest = p.steps % kTile;
  if (whole) {
    configure(upper, lower, kTile);
    run(p, left, right, whole, kTile, p.first);
  }
  // The rest of the depth by tiles that are as short: nothing is read past a row's end.
  if (rest) {
    configure(upper, lower, int(rest));
    run(p, left + whole * kTile * 4, right + whole * kTile * p.step_bytes, 1, int(rest),
        p.first && !whole);
  }
}

inline void release_tiles() {
  configured = {};
  TileRegisters::release();
}

}  // namespace vlora::runtime::VLORA_ISA

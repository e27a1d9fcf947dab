// Products of rows of bf16 pairs with packed panels, on a tile unit. Included after the tile
// registers of an instruction set (tile_amx.h or tile_twin.h).
#pragma once

#include "runtime/kernel_scope.h"
#include "runtime/tile_block.h"

namespace vlora::runtime::VLORA_ISA {

// Shapes of the tile registers, in the layout that LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The shape for which this thread's registers are configured.
struct Configured {
  int upper = 0, lower = 0;  // rows of the two tiles of the left factor
  int steps = 0;
};
inline thread_local Configured configured;

inline void release_tiles() {
  configured = {};
  TileRegisters::release();
}

// Configures the registers of a TileBlock for two tiles of rows and `steps` steps. The thread's
// KernelScope releases them.
inline void configure(int upper, int lower, int steps) {
  if (configured.upper == upper && configured.lower == lower && configured.steps == steps) return;
  configured = {upper, lower, steps};
  TileShapes s;
  for (int t = 0; t < 4; ++t) {
    s.rows[t] = uint8_t(t < 2 ? upper : lower);
    s.line_bytes[t] = kAmxRows * 4;
  }
  for (int t = 4; t < 6; ++t) {
    s.rows[t] = uint8_t(t == 4 ? upper : lower);
    s.line_bytes[t] = uint16_t(4 * steps);
    s.rows[t + 2] = uint8_t(steps);
    s.line_bytes[t + 2] = kAmxRows * 4;
  }
  // AMX rejects a register without rows that has a line length.
  for (int t : {2, 3, 5})
    if (lower == 0) s.rows[t] = 0, s.line_bytes[t] = 0;
  TileRegisters::configure(s);
  release_at_scope_end(release_tiles);
}

// Multiplies a block over `count` tiles of depth, of `steps` steps each.
template <bool kLower, bool kSecond>
void multiply_block(const TileProduct& p, const char* left, const char* right, int64_t count,
                    int steps, bool first) {
  using Block = TileBlock<kLower ? 2 : 1, kSecond ? 2 : 1>;
  if (first)
    Block::zero();
  else
    Block::load(p.out, p.out_stride);
  Block::template multiply_depth<false>(
      {left, p.left_bytes, 4 * steps, kAmxRows * p.left_bytes},
      {right, p.step_bytes, steps * p.step_bytes, p.panel_bytes}, count, [](auto) {}, [] {});
  Block::store(p.out, p.out_stride);
}

inline void multiply_tiles(const TileProduct& p) {
  const int upper = p.rows < kAmxRows ? p.rows : kAmxRows, lower = p.rows - upper;
  const auto run = lower ? p.panels > 1 ? multiply_block<true, true> : multiply_block<true, false>
                   : p.panels > 1 ? multiply_block<false, true>
                                  : multiply_block<false, false>;
  const char* left = static_cast<const char*>(p.left);
  const char* right = static_cast<const char*>(p.right);
  const int64_t full = p.steps / kAmxRows, rest = p.steps % kAmxRows;
  if (full) {
    configure(upper, lower, kAmxRows);
    run(p, left, right, full, kAmxRows, p.first);
  }
  // The remaining steps use shorter tiles, so that nothing beyond the end of a row is read.
  if (rest) {
    configure(upper, lower, int(rest));
    run(p, left + full * kAmxRows * 4, right + full * kAmxRows * p.step_bytes, 1, int(rest),
        p.first && !full);
  }
}

}  // namespace vlora::runtime::VLORA_ISA

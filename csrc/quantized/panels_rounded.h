// Products with int4 weights in panels of 16 rows that are rounded to bf16, on a tile unit. x is
// the left factor and W the right one. The conversion takes longer than that of integers, but sums
// stay in tiles. With more rows of x this is faster.
#pragma once

#include <algorithm>
#include <utility>

#include "quantized/panel_tiles.h"

namespace vlora::quantized::VLORA_ISA {

// Converts kPanels panels, from `panel` on, to tiles of rounded weights, a quarter of a tile at a
// time.
template <int kPanels>
class RoundedConversion {
 public:
  RoundedConversion(const Weight& w, const PanelSlice& slice, int64_t panel)
      : w_(w), panel_(panel), depth_(slice.from) {}

  // Begins the next `tiles` tiles of the depth. Those of the second panel are kRoundedTiles
  // further.
  void begin(int64_t tiles, char* to) {
    first_ = depth_, depth_ += tiles;
    to_ = to, next_ = 0, count_ = tiles * kPanels * kQuarters;
  }
  VLORA_INLINE void advance(int64_t quarters) {
    for (; quarters > 0 && next_ < count_; --quarters, ++next_) {
      const auto number = uint64_t(next_);
      const int64_t quarter = number % kQuarters, tile = number / kQuarters / kPanels,
                    half = number / kQuarters % kPanels, panel = panel_ + half;
      if (quarter == 0) find_group(panel, first_ + tile);
      const uint8_t* const from = w_.values + panel * kTilePanelRows * w_.row_bytes() +
                                  (first_ + tile) * kStoredTile + quarter * (kStoredTile / 4);
      __builtin_prefetch(from + kValuesAhead, 0, 3);
      table_.convert_scaled(from, scales_, offsets_,
                            to_ + (half * kRoundedTiles + tile) * kTile + quarter * (kTile / 4));
    }
  }
  void finish() { advance(count_); }

 private:
  void find_group(int64_t panel, int64_t tile) {
    const int64_t index =
        kTilePanelRows * (panel * w_.groups() + (tile * kMinGroup >> w_.group_shift));
    scales_ = w_.scales + index;
    __builtin_prefetch(scales_ + kScalesAhead / 4, 0, 3);
    if (!w_.zeros) return;
    __builtin_prefetch(w_.zeros + index + kZerosAhead, 0, 3);
    for (int i = 0; i < kLanes; i += R::kWidth)
      (load_bytes(w_.zeros + index + i) * R::load(scales_ + i) * R::all(-kZeroStep))
          .store(offsets_ + i);
  }

  const IntegerTable table_{};
  const Weight w_;
  const int64_t panel_;
  int64_t depth_, first_ = 0, next_ = 0, count_ = 0;
  char* to_ = nullptr;
  const float* scales_ = nullptr;
  alignas(64) float offsets_[kLanes] = {};
};

// Adds the products of one or two tiles of rows of x with one or two panels to their sums.
template <int kTall, int kWide, class Between>
void add_block(const char* x, int64_t x_tile_bytes, const char* w, int64_t tiles, bool first,
               float* sums, const Between& between) {
  using Block = TileBlock<kTall, kWide>;
  if (first)
    Block::zero();
  else
    Block::load(sums, kWide * kLanes);
  Block::template multiply_depth<false>(
      {x, kTileLine, kTile, x_tile_bytes}, {w, kTileLine, kTile, kRoundedTiles * kTile}, tiles,
      [](auto) {}, between);
  Block::store(sums, kWide * kLanes);
}

// Multiplies kWide panels from `panel` on, with the weights rounded to bf16. The next part of the
// depth is converted between the products of the part before it.
template <int kWide>
void multiply_rounded(const Product& p, const PanelSlice& slice, const char* x, int64_t panel,
                      char* scratch) {
  constexpr int kStride = kWide * kLanes;
  const int64_t tiles = slice.tiles(), pairs = ceil_div(tiles, 2), bytes = slice.tile_bytes();
  char* converted = scratch;
  char* other = scratch + 2 * kRoundedTiles * kTile;
  auto* const sums = reinterpret_cast<float*>(scratch + kPanelScratch * kTile);
  RoundedConversion<kWide> conversion(p.w, slice, panel);
  conversion.begin(std::min<int64_t>(slice.count, kRoundedTiles), converted);
  conversion.finish();
  for (int64_t k = 0; k < slice.count; k += kRoundedTiles) {
    const int64_t now = std::min<int64_t>(slice.count - k, kRoundedTiles);
    conversion.begin(std::min<int64_t>(slice.count - k - now, kRoundedTiles), other);
    const int64_t quarters = ceil_div(kRoundedTiles * kWide * kQuarters, now * pairs);
    const auto between = [&] { conversion.advance(quarters); };
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const char* const from = x + tile * bytes + k * kTile;
      float* const to = sums + tile * kAmxRows * kStride;
      if (tile + 1 < tiles)
        add_block<2, kWide>(from, bytes, converted, now, k == 0, to, between);
      else
        add_block<1, kWide>(from, bytes, converted, now, k == 0, to, between);
    }
    conversion.finish();
    std::swap(converted, other);
  }
  for (int64_t row = 0; row < slice.rows; ++row) {
    float* const y = p.y + (slice.row + row) * p.y_stride + panel * kTilePanelRows;
    for (int i = 0; i < kStride; i += R::kWidth) {
      R sum = R::load(sums + row * kStride + i);
      if (slice.adds())
        sum = sum + R::load(y + i);
      else if (p.bias)
        sum = sum + R::load(p.bias + panel * kTilePanelRows + i);
      store_one(sum, y + i, slice.streaming);
    }
  }
}

inline void run_rounded(const Product& p, const PanelSlice& slice, const char* x, int64_t from,
                        int64_t to, char* scratch) {
  configure(kAmxRows, kAmxRows, kAmxRows);
  for (; from + 2 <= to; from += 2) multiply_rounded<2>(p, slice, x, from, scratch);
  if (from < to) multiply_rounded<1>(p, slice, x, from, scratch);
}

}  // namespace vlora::quantized::VLORA_ISA

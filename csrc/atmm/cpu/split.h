// A wave that blocks of rows cannot share evenly, shared inside its segments.
#pragma once

#include <vector>

#include "runtime/threads.h"
#include "products.h"

namespace vlora::atmm {

constexpr int64_t kLeastDepth = 64;
// Of a part of a panel: shorter ones are not worth an extra sum.

// A segment with its tile and its blocks of rows.
struct Unit {
  const Segment* segment;
  TileConfig config;
  double seconds;  // estimated
  int64_t blocks;
  int64_t first_block;  // counted over the wave

  double block_seconds() const { return seconds / double(blocks); }
};

// One output of one unit, where its work is shared by all threads.
struct Item {
  const Unit* unit;
  int output;
  float* low;
  int64_t expand_before;  // work of the second product before this item
};

// Where a thread's share of the first product begins: inside a bundle only if few are to share.
struct Cut {
  size_t item;
  int64_t bundle, k;
  bool operator==(const Cut& o) const { return item == o.item && bundle == o.bundle && k == o.k; }
};

// A wave that blocks of rows cannot balance: all threads share each product, first A's bundles (and
// parts of their depth), then, when all have done theirs, the columns of y.
class Split {
 public:
  Split(const Call& c, const std::vector<Unit>& units, int threads) : c_(c) {
    int64_t floats = 0, most_rows = 0, bundles = 0;
    for (const Unit& unit : units)
      for (int o = 0; o < c.p.outputs; ++o) {
        const Pair& pair = c.pair(*unit.segment, o);
        if (!pair.rank) continue;
        items_.push_back({&unit, o, nullptr, expand_});
        const Panels a = c.a(pair);
        for (int64_t bundle = 0; bundle < a.bundles(); ++bundle)
          shrink_ += weight(a, bundle) * c.p.d_in;
        bundles += a.bundles();
        expand_ += c.b(pair, o).bundles() * pair.rank;
        floats += low_floats(pair, unit.segment->length);
        most_rows = std::max(most_rows, unit.segment->length);
      }
    part_floats_ = most_rows * kRowStride;
    floats_ = floats + threads * part_floats_;
    inside_ = !c.one_order && bundles < 8 * threads;
  }

  // Memory for the intermediate, floats() of it: before the first thread begins.
  int64_t floats() const { return floats_; }
  void use(float* memory) {
    for (Item& item : items_) {
      item.low = memory;
      memory += low_floats(pair(item), rows(item));
    }
    parts_ = memory;
  }

  // On every thread of a region, of as many as it was made for or fewer.
  void operator()(const runtime::Team& team) const {
    const int thread = team.thread, threads = team.threads;
    first_product(cut(thread, threads), cut(thread + 1, threads), part(thread));
    team.wait();
    bool parts = false;
    for (int other = 1; other < threads; ++other) parts |= cut(other, threads).k != 0;
    if (parts || c_.p.dtype == Dtype::kBf16) {  // little work: one thread, then all go on
      if (thread == 0) {
        for (int other = 1; other < threads; ++other)
          if (const Cut from = cut(other, threads); !(from == cut(other + 1, threads)))
            add_part(from, part(other));
        for (const Item& item : items_) finish_low(c_, pair(item), rows(item), item.low);
      }
      team.wait();
    }
    second_product(expand_ * thread / threads, expand_ * (thread + 1) / threads);
  }

 private:
  const Pair& pair(const Item& item) const { return c_.pair(*item.unit->segment, item.output); }
  static int64_t rows(const Item& item) { return item.unit->segment->length; }
  float* part(int thread) const { return parts_ + thread * part_floats_; }

  // Lines of a step: a narrow panel has half of one.
  static int64_t weight(const Panels& a, int64_t bundle) {
    return a.first_of(bundle) == a.wide() ? 1 : 2 * (a.first_of(bundle + 1) - a.first_of(bundle));
  }

  Cut cut(int thread, int threads) const {
    int64_t at = shrink_ * thread / threads;
    for (size_t i = 0; i < items_.size(); ++i) {
      const Panels a = c_.a(pair(items_[i]));
      for (int64_t bundle = 0; bundle < a.bundles(); ++bundle) {
        const int64_t all = weight(a, bundle) * c_.p.d_in;
        if (at >= all) {
          at -= all;
          continue;
        }
        const int64_t k = at / weight(a, bundle) / kLeastDepth * kLeastDepth;
        if (inside_ && k && k + kLeastDepth <= c_.p.d_in) return {i, bundle, k};
        if (2 * at < all) return {i, bundle, 0};
        return bundle + 1 < a.bundles() ? Cut{i, bundle + 1, 0} : Cut{i + 1, 0, 0};
      }
    }
    return {items_.size(), 0, 0};
  }

  // A bundle that the share begins inside goes to `part`, since another thread begins it.
  void first_product(const Cut& from, const Cut& to, float* part) const {
    for (size_t i = from.item; i <= to.item && i < items_.size(); ++i) {
      const Panels a = c_.a(pair(items_[i]));
      int64_t first = i == from.item ? from.bundle : 0;
      const int64_t last = i == to.item ? to.bundle : a.bundles();
      const int64_t end = i == to.item ? to.k : 0;
      const bool mid = i == from.item && from.k;
      if (mid) {
        shrink_part(items_[i], first, from.k, first == last ? end : c_.p.d_in, part);
        if (first++ == last) continue;
      }
      shrink_bundles(items_[i], first, last);
      if (end) shrink_part(items_[i], last, 0, end, low_at(items_[i], a.first_of(last)));
    }
  }

  static float* low_at(const Item& item, int64_t panel) {
    constexpr int64_t kBlockPanels = kRankBlock / kPanel;
    return item.low + panel / kBlockPanels * rows(item) * kRowStride + panel % kBlockPanels * kPanel;
  }

  void shrink_bundles(const Item& item, int64_t first, int64_t last) const {
    constexpr int64_t kBlockPanels = kRankBlock / kPanel;
    const Segment& s = *item.unit->segment;
    const Panels a = c_.a(pair(item));
    const int64_t end = a.first_of(last);
    for (int64_t panel = a.first_of(first); panel < end;) {
      const int64_t next = std::min(end, (panel / kBlockPanels + 1) * kBlockPanels);
      over_depth(c_, item.unit->config, s.start, s.length, 0, c_.p.d_in, [&](const Rows& x) {
        shrink_block(c_, item.unit->config, pair(item), s.length, x, low_at(item, panel), panel,
                     next);
      });
      panel = next;
    }
  }

  void shrink_part(const Item& item, int64_t bundle, int64_t from, int64_t to, float* out) const {
    const Segment& s = *item.unit->segment;
    const Panels a = c_.a(pair(item));
    over_depth(c_, item.unit->config, s.start, s.length, from, to, [&](const Rows& x) {
      shrink_block(c_, item.unit->config, pair(item), s.length, x, out, a.first_of(bundle),
                   a.first_of(bundle + 1));
    });
  }

  void add_part(const Cut& cut, const float* part) const {
    if (!cut.k) return;
    const Item& item = items_[cut.item];
    const Panels a = c_.a(pair(item));
    const int64_t first = a.first_of(cut.bundle);
    const int64_t columns = (a.first_of(cut.bundle + 1) - first) * kPanel;
    float* low = low_at(item, first);
    for (int64_t row = 0; row < rows(item); ++row)
      for (int64_t i = 0; i < columns; ++i) low[row * kRowStride + i] += part[row * kRowStride + i];
  }

  void second_product(int64_t from, int64_t to) const {
    for (const Item& item : items_) {
      const Panels b = c_.b(pair(item), item.output);
      const auto bundle = [&](int64_t at) {
        return std::clamp<int64_t>(ceil_div(at - item.expand_before, int64_t(pair(item).rank)), 0,
                                   b.bundles());
      };
      const int64_t first = b.first_of(bundle(from)), last = b.first_of(bundle(to));
      const Segment& s = *item.unit->segment;
      if (first < last)
        expand(c_, item.unit->config, s, item.output, s.start, s.length, item.low, first, last);
    }
  }

  const Call& c_;
  std::vector<Item> items_;
  int64_t shrink_ = 0, expand_ = 0;  // all work
  float* parts_ = nullptr;           // a thread's, each part_floats_
  int64_t part_floats_ = 0;
  int64_t floats_ = 0;
  bool inside_ = false;  // shares may begin inside a bundle
};

}  // namespace vlora::atmm

// A wave whose blocks of rows cannot be balanced: all threads share the work inside its segments.
#pragma once

#include <vector>

#include "products.h"
#include "runtime/threads.h"

namespace vlora::atmm {

// Minimum depth of a part of a panel. The sums of parts must be added, which shorter parts would
// not repay.
constexpr int64_t kMinPartDepth = 64;

// A segment with its tile configuration and its division into blocks of rows.
struct SegmentWork {
  const Segment* segment;
  TileConfig config;
  double seconds;  // estimated
  int64_t blocks;
  int64_t first_block;  // index within the wave

  double block_seconds() const { return seconds / double(blocks); }
};

// Computes a wave on all threads. They first share the bundles of A (and parts of their depth).
// After a barrier they share the columns of y.
class SharedWave {
 public:
  SharedWave(const Call& c, const std::vector<SegmentWork>& segments, int threads) : c_(c) {
    int64_t floats = 0, max_rows = 0, bundles = 0;
    for (const SegmentWork& work : segments)
      for (int o = 0; o < c.p.outputs; ++o) {
        const Pair& pair = c.pair(*work.segment, o);
        if (!pair.rank) continue;
        items_.push_back({&work, o, nullptr, expand_work_});
        const Panels a = c.a(pair);
        for (int64_t bundle = 0; bundle < a.bundles(); ++bundle)
          shrink_work_ += half_lines(a, bundle) * c.p.d_in;
        bundles += a.bundles();
        expand_work_ += c.b(pair, o).bundles() * pair.rank;
        floats += low_floats(pair, work.segment->length);
        max_rows = std::max(max_rows, work.segment->length);
      }
    part_floats_ = max_rows * kScratchStride;
    floats_ = floats + threads * part_floats_;
    divides_depth_ = !c.fixed_order && bundles < 8 * threads;
  }

  // Returns the floats of memory for the intermediate. use() must be called with this memory before
  // the first thread starts.
  int64_t floats() const { return floats_; }
  void use(float* memory) {
    for (Item& item : items_) {
      item.low = memory;
      memory += low_floats(pair(item), rows(item));
    }
    parts_ = memory;
  }

  // Does one thread's share. Each thread of a region of at most `threads` threads calls it once.
  void operator()(const runtime::Team& team) const {
    const int thread = team.thread, threads = team.threads;
    first_product(share_begin(thread, threads), share_begin(thread + 1, threads), part(thread));
    team.wait();
    bool has_parts = false;
    for (int other = 1; other < threads; ++other) has_parts |= share_begin(other, threads).k != 0;
    if (has_parts || c_.p.dtype == Dtype::kBf16) {
      // This is so little work that one thread does it before the others continue.
      if (thread == 0) {
        for (int other = 1; other < threads; ++other)
          if (const Position from = share_begin(other, threads);
              !(from == share_begin(other + 1, threads)))
            add_part(from, part(other));
        for (const Item& item : items_) finish_low(c_, pair(item), rows(item), item.low);
      }
      team.wait();
    }
    second_product(expand_work_ * thread / threads, expand_work_ * (thread + 1) / threads);
  }

 private:
  // One output of one segment.
  struct Item {
    const SegmentWork* work;
    int output;
    float* low;             // its intermediate
    int64_t expand_before;  // work of the second product in the items before this one
  };

  // Beginning of a thread's share of the first product: a bundle of an item and, within the bundle,
  // element k of the depth.
  struct Position {
    size_t item;
    int64_t bundle, k;
    bool operator==(const Position& o) const {
      return item == o.item && bundle == o.bundle && k == o.k;
    }
  };

  const Pair& pair(const Item& item) const { return c_.pair(*item.work->segment, item.output); }
  static int64_t rows(const Item& item) { return item.work->segment->length; }
  float* part(int thread) const { return parts_ + thread * part_floats_; }

  // Returns the half cache lines in a step of a bundle: one for a narrow panel, two per wide panel.
  static int64_t half_lines(const Panels& a, int64_t bundle) {
    return a.first_of(bundle) == a.wide() ? 1 : 2 * (a.first_of(bundle + 1) - a.first_of(bundle));
  }

  Position share_begin(int thread, int threads) const {
    int64_t remaining = shrink_work_ * thread / threads;
    for (size_t i = 0; i < items_.size(); ++i) {
      const Panels a = c_.a(pair(items_[i]));
      for (int64_t bundle = 0; bundle < a.bundles(); ++bundle) {
        const int64_t work = half_lines(a, bundle) * c_.p.d_in;
        if (remaining >= work) {
          remaining -= work;
          continue;
        }
        const int64_t k = remaining / half_lines(a, bundle) / kMinPartDepth * kMinPartDepth;
        if (divides_depth_ && k && k + kMinPartDepth <= c_.p.d_in) return {i, bundle, k};
        if (2 * remaining < work) return {i, bundle, 0};
        return bundle + 1 < a.bundles() ? Position{i, bundle + 1, 0} : Position{i + 1, 0, 0};
      }
    }
    return {items_.size(), 0, 0};
  }

  // If a share begins inside a bundle, that bundle's sums go to `part`, because another thread
  // computes the first part of its depth.
  void first_product(const Position& from, const Position& to, float* part) const {
    for (size_t i = from.item; i <= to.item && i < items_.size(); ++i) {
      const Panels a = c_.a(pair(items_[i]));
      int64_t first = i == from.item ? from.bundle : 0;
      const int64_t last = i == to.item ? to.bundle : a.bundles();
      const int64_t end = i == to.item ? to.k : 0;
      const bool begins_inside = i == from.item && from.k;
      if (begins_inside) {
        shrink_part(items_[i], first, from.k, first == last ? end : c_.p.d_in, part);
        if (first++ == last) continue;
      }
      shrink_bundles(items_[i], first, last);
      if (end) shrink_part(items_[i], last, 0, end, low_of(items_[i], a.first_of(last)));
    }
  }

  // Returns the address at which the columns of a panel begin in an item's intermediate.
  static float* low_of(const Item& item, int64_t panel) {
    constexpr int64_t kBlockPanels = kRankBlock / kPanel;
    return item.low + panel / kBlockPanels * rows(item) * kScratchStride +
           panel % kBlockPanels * kPanel;
  }

  void shrink_bundles(const Item& item, int64_t first, int64_t last) const {
    constexpr int64_t kBlockPanels = kRankBlock / kPanel;
    const Segment& s = *item.work->segment;
    const Panels a = c_.a(pair(item));
    const int64_t end = a.first_of(last);
    for (int64_t panel = a.first_of(first); panel < end;) {
      const int64_t next = std::min(end, (panel / kBlockPanels + 1) * kBlockPanels);
      over_depth(c_, item.work->config, s.start, s.length, 0, c_.p.d_in, [&](const Rows& x) {
        shrink_block(c_, item.work->config, pair(item), s.length, x, low_of(item, panel), panel,
                     next);
      });
      panel = next;
    }
  }

  void shrink_part(const Item& item, int64_t bundle, int64_t from, int64_t to, float* out) const {
    const Segment& s = *item.work->segment;
    const Panels a = c_.a(pair(item));
    over_depth(c_, item.work->config, s.start, s.length, from, to, [&](const Rows& x) {
      shrink_block(c_, item.work->config, pair(item), s.length, x, out, a.first_of(bundle),
                   a.first_of(bundle + 1));
    });
  }

  void add_part(const Position& begin, const float* part) const {
    if (!begin.k) return;
    const Item& item = items_[begin.item];
    const Panels a = c_.a(pair(item));
    const int64_t first = a.first_of(begin.bundle);
    const int64_t columns = (a.first_of(begin.bundle + 1) - first) * kPanel;
    float* low = low_of(item, first);
    for (int64_t row = 0; row < rows(item); ++row)
      for (int64_t i = 0; i < columns; ++i)
        low[row * kScratchStride + i] += part[row * kScratchStride + i];
  }

  // Computes the part [from, to) of the second product's work. A bundle of B is `rank` units of it.
  void second_product(int64_t from, int64_t to) const {
    for (const Item& item : items_) {
      const Panels b = c_.b(pair(item), item.output);
      const auto bundle = [&](int64_t work) {
        return std::clamp<int64_t>(ceil_div(work - item.expand_before, int64_t(pair(item).rank)), 0,
                                   b.bundles());
      };
      const int64_t first = b.first_of(bundle(from)), last = b.first_of(bundle(to));
      const Segment& s = *item.work->segment;
      if (first < last)
        expand(c_, item.work->config, s, item.output, s.start, s.length, item.low, first, last);
    }
  }

  const Call& c_;
  std::vector<Item> items_;
  int64_t shrink_work_ = 0, expand_work_ = 0;
  float* parts_ = nullptr;  // one for each thread, part_floats_ apart
  int64_t part_floats_ = 0;
  int64_t floats_ = 0;
  bool divides_depth_ = false;  // whether shares may begin inside a bundle
};

}  // namespace vlora::atmm

// The segments of a step, arranged in waves whose segments can run concurrently.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "atmm/types.h"

namespace vlora::atmm {

// Segments of one wave share no rows, and a wave starts after the previous one has ended. Segments
// that overlap (of a row's own adapter, and of the live adapter with sign -1) keep their order.
class SegmentList {
 public:
  explicit SegmentList(std::vector<Segment> segments) {
    std::vector<int> wave(segments.size(), 0);
    bool disjoint = true;
    for (size_t i = 0; i < segments.size(); ++i) {
      const Segment& s = segments[i];
      if (s.start < 0 || s.length < 0 || s.slot < 0 || (s.sign != 1 && s.sign != -1))
        throw std::invalid_argument("segment " + text(s) +
                                    ": start, length and slot must not be negative, and the sign"
                                    " must be +1 or -1");
      if (s.length > INT64_MAX - s.start)
        throw std::invalid_argument("segment " + text(s) + " ends beyond the 64-bit range");
      if (s.start < end_) disjoint = false;
      end_ = std::max(end_, s.start + s.length);
      slots_ = std::max<int64_t>(slots_, s.slot + 1);
    }
    int waves = segments.empty() ? 0 : 1;
    if (!disjoint) {
      for (size_t i = 0; i < segments.size(); ++i)
        for (size_t j = 0; j < i; ++j)
          if (segments[j].start < segments[i].start + segments[i].length &&
              segments[i].start < segments[j].start + segments[j].length)
            wave[i] = std::max(wave[i], wave[j] + 1);
      for (int w : wave) waves = std::max(waves, w + 1);
    }
    for (int w = 0; w < waves; ++w) {
      begins_.push_back(segments_.size());
      for (size_t i = 0; i < segments.size(); ++i)
        if (wave[i] == w && segments[i].length > 0) segments_.push_back(segments[i]);
    }
    begins_.push_back(segments_.size());
  }

  int waves() const { return int(begins_.size()) - 1; }
  const Segment* begin(int wave) const { return segments_.data() + begins_[size_t(wave)]; }
  const Segment* end(int wave) const { return segments_.data() + begins_[size_t(wave) + 1]; }
  int64_t size() const { return int64_t(segments_.size()); }
  int64_t rows() const { return end_; }     // first row after all segments
  int64_t slots() const { return slots_; }  // one more than the highest slot

  static std::string text(const Segment& s) {
    return "(start " + std::to_string(s.start) + ", length " + std::to_string(s.length) +
           ", slot " + std::to_string(s.slot) + ", sign " + std::to_string(s.sign) + ")";
  }

 private:
  std::vector<Segment> segments_;  // wave by wave
  std::vector<size_t> begins_;     // index of each wave's first segment, and the number of all
  int64_t end_ = 0, slots_ = 0;
};

}  // namespace vlora::atmm

// What of keys and values is asked for before it is read.
#pragma once

#include "attention/attention.h"

namespace vlora::attention::VLORA_ISA {

constexpr int64_t kLeadBytes = 4096;

// Keys and values of a piece, then of the next one, in the order in which they lie in memory, page by page,
// whatever the order in which they are read. They go to L2: what is asked for into L1 holds one of its few
// places for lines on their way until memory answers, and products would wait for one.
template <class T>
class Ahead {
 public:
  // window: bytes that are read in an order of their own, half of them first. lead: bytes of the piece that
  // were asked for before.
  Ahead(const Problem& p, const Piece& piece, const Piece* next, int64_t window, int64_t lead)
      : p_(p), layout_(p.plan->layout), next_(next) {
    size_ = layout_.panel() * int64_t(sizeof(T));
    begin(piece);
    behind_ = window / 2 + kLeadBytes - lead;
    const int64_t done = lead / size_;
    head_ = done % heads_;
    values_ = done / heads_ % 2;
    panel_ += done / heads_ / 2;
    if (panel_ < last_) {
      begin_page();
      begin_panel();
      at_ += lead % size_;
    } else {
      end();
    }
  }

  // As much as is read meanwhile; twice as much until there is a lead.
  template <int kLines>
  VLORA_INLINE void ask() {
    issue<kLines>();
    if (behind_ <= 0) return;
    behind_ -= kLines * 64;
    issue<kLines>();
  }

  // Bytes of the next piece that were asked for.
  int64_t lead() const {
    if (!in_next_) return 0;
    const int64_t done = ((panel_ - first_) * 2 + values_) * heads_ + head_;
    return done * size_ + (at_ ? size_ - (end_ - at_) : 0);
  }

 private:
  template <int kLines>
  VLORA_INLINE void issue() {
    if (!at_) return;
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(at_ + line * 64, 0, 2);
    at_ += kLines * 64;
    if (at_ >= end_) step();
  }
  void step() {
    if (++head_ == heads_) {
      head_ = 0;
      if (values_ && ++panel_ == last_) return end();
      values_ = !values_;
      if (!values_) begin_page();
    }
    begin_panel();
  }
  void end() {
    head_ = 0;
    values_ = false;
    at_ = end_ = nullptr;
    if (!next_) return;
    begin(*next_);
    next_ = nullptr;
    in_next_ = true;
    begin_page();
    begin_panel();
  }
  void begin(const Piece& piece) {
    base_ = reinterpret_cast<const T*>(p_.cache) + piece.kv_head * layout_.head();
    pages_ = p_.plan->pages.data() + p_.plan->chunks[size_t(piece.chunk)].first_page;
    heads_ = piece.kv_heads;
    first_ = panel_ = piece.panel;
    last_ = piece.panel + piece.panels;
  }
  void begin_page() {
    const int64_t per_page = layout_.panels();
    page_ = base_ + pages_[panel_ / per_page] * layout_.page + panel_ % per_page * layout_.panel();
  }
  void begin_panel() {
    const T* const at = page_ + head_ * layout_.head() + (values_ ? layout_.values() : 0);
    at_ = reinterpret_cast<const char*>(at);
    end_ = at_ + size_;
  }

  const Problem& p_;
  const Layout& layout_;
  const Piece* next_;
  const T *base_, *page_ = nullptr;
  const int32_t* pages_;
  int64_t size_, heads_, first_, panel_, last_, head_ = 0, behind_;
  const char *at_ = nullptr, *end_ = nullptr;
  bool values_ = false, in_next_ = false;
};

}  // namespace vlora::attention::VLORA_ISA

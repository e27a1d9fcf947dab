// Kernel calls of a step that are recorded once and repeated in later steps. Only bindings include
// this file.
//
// A decoding step makes the same calls as the step before: only the positions and the contents of
// memory differ. Through Python, each call costs about ten microseconds, a tenth of the step of a
// small model. Repeating a recording makes all of them with one call.
#pragma once

#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/kernel_call.h"

namespace vlora::attention {
class Plan;
}
namespace vlora::atmm {
class SegmentList;
}

namespace vlora::steps {

// Arguments that differ between the steps that repeat a recording.
struct Inputs {
  int threads;
  const attention::Plan* plan = nullptr;
  const float* cosines = nullptr;  // [rows, dim / 2], as are the sines
  const float* sines = nullptr;
  const atmm::SegmentList* segments = nullptr;
};

using Call = std::function<void(const Inputs&)>;

// Recorded calls in their order. The memory whose addresses they contain must exist whenever they
// are repeated.
class Recording {
 public:
  ~Recording() {
    if (current() == this) current() = nullptr;
  }

  // Records the calls of this thread from now on.
  void begin() {
    if (current()) throw std::logic_error("this thread records another step already");
    calls_.clear();
    complete_ = false;
    spoiled_ = false;
    current() = this;
  }

  void end() {
    if (current() != this) throw std::logic_error("this thread makes another recording, or none");
    current() = nullptr;
    complete_ = !spoiled_;
    if (spoiled_) calls_.clear();
  }

  // Marks the recording as one that must not be repeated.
  void spoil() { spoiled_ = true; }

  // True if the recording has ended and may be repeated.
  bool complete() const { return complete_; }

  size_t size() const { return calls_.size(); }

  void add(Call call) { calls_.push_back(std::move(call)); }

  void repeat(const Inputs& inputs) const {
    if (!complete_) throw std::logic_error("this recording is not complete");
    const runtime::KernelCall released;
    for (const Call& call : calls_) call(inputs);
  }

  // The recording of this thread, or null.
  static Recording*& current() {
    static thread_local Recording* recording = nullptr;
    return recording;
  }

 private:
  std::vector<Call> calls_;
  bool complete_ = false, spoiled_ = false;
};

// Makes a call of kernels from Python, and records it if this thread records.
template <class Function>
void perform(const Inputs& inputs, const Function& call) {
  if (Recording* const recording = Recording::current()) recording->add(call);
  const runtime::KernelCall released;
  call(inputs);
}

}  // namespace vlora::steps

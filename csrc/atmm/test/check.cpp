// Compares random problems on every instruction set of this CPU with double precision, and checks
// the thread pool. It is meant for builds with sanitizers (sanitize.py): every buffer is exactly as
// large as its contents.
//
//     check [rounds] [own | openmp]
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "atmm/kernels.h"
#include "check_attention.h"
#include "check_operator.h"
#include "check_quantized.h"
#include "runtime/dispatch.h"
#include "runtime/kernel_scope.h"
#include "runtime/large_pages.h"
#include "runtime/threads.h"

using namespace vlora;
using namespace vlora::atmm;

namespace {

// Runs parallel regions of varying size from two callers at once. Some of the regions throw.
void check_threads(int rounds) {
  const auto caller = [rounds] {
    for (int round = 0; round < rounds; ++round) {
      const int threads = 1 + round % 5, failing = round % 7;
      std::vector<int> runs(100, 0);
      runtime::share_out(threads, 100, [&](int64_t piece) { ++runs[size_t(piece)]; });
      for (int count : runs)
        if (count != 1) std::exit(2);
      std::atomic<int> arrived{0};
      auto body = [&](const runtime::Team& team) {
        arrived += 1;
        team.wait();
        if (arrived != team.threads) std::exit(3);
        team.wait();
        if (team.thread == failing) throw 1;
        team.wait();
      };
      bool thrown = false;
      try {
        runtime::run_on(threads, body);
      } catch (int) {
        thrown = true;
      }
      if (thrown != (failing < arrived)) std::exit(4);
    }
  };
  std::thread other(caller);
  caller();
  other.join();
}

// Allocates and frees pieces in two threads. Each piece must keep its contents, and no piece may
// remain at the end.
void check_large_pages(int rounds) {
  const auto owner = [rounds](int seed) {
    std::mt19937 bits(static_cast<unsigned>(seed));
    struct Piece {
      std::shared_ptr<char> memory;
      size_t bytes;
      char value;
    };
    std::vector<Piece> pieces;
    for (int round = 0; round < rounds; ++round) {
      const size_t bytes = 1 + bits() % (round % 16 ? 200000 : 20000000);
      pieces.push_back({runtime::in_large_pages(bytes), bytes, char(bits())});
      std::memset(pieces.back().memory.get(), pieces.back().value, bytes);
      if (pieces.size() < 8) continue;
      std::swap(pieces[bits() % pieces.size()], pieces.back());
      const Piece& last = pieces.back();
      for (size_t i = 0; i < last.bytes; ++i)
        if (last.memory.get()[i] != last.value) std::exit(5);
      pieces.pop_back();
    }
  };
  const size_t before = runtime::large_pages().allocated;
  std::thread other(owner, 1);
  owner(2);
  other.join();
  if (runtime::large_pages().allocated != before) std::exit(6);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  const bool uses_openmp = argc > 2 && !std::strcmp(argv[2], "openmp");
  if (!runtime::set_thread_source(uses_openmp ? runtime::ThreadSource::kOpenMp
                                              : runtime::ThreadSource::kOwn)) {
    std::printf("no OpenMP runtime in this process\n");
    return 1;
  }
  check_threads(10 * rounds);
  check_large_pages(rounds);
  for (int i = runtime::kIsas - 1; i >= 0; --i) {
    if (!runtime::runs_here(runtime::Isa(i))) {
      std::printf("%s: skipped, this CPU does not support it\n", runtime::name_of(runtime::Isa(i)));
      continue;
    }
    const Kernels& current = kernels(runtime::Isa(i));
    const auto run = [&] {
      const runtime::KernelScope scope;
      for (int round = 0; round < rounds; ++round)
        for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
          check_apply(current, dtype, dtype, round % 8 == 0);
          if (dtype == Dtype::kBf16) check_apply(current, dtype, Dtype::kFp32, round % 8 == 0);
          check_merge(current, dtype);
          check_heads(current);
          if (current.tiles) check_tiles(current);
          check_attention(runtime::Isa(i));
          check_product(runtime::Isa(i));
          check_elementwise(runtime::Isa(i));
          check_quantized(runtime::Isa(i));
          check_quantize(runtime::Isa(i));
        }
    };
    std::thread(run).join();  // the leak check fails if the thread does not free its scratch
    std::printf("%s: %d rounds on %s threads\n", current.name, rounds,
                uses_openmp ? "OpenMP's" : "own");
  }
}

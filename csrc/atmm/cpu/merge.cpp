// out = in + sign * B A for many matrices (§4.4.1).
#include <emmintrin.h>

#include <cstring>
#include <vector>

#include "atmm/operator.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "walk.h"

namespace vlora::atmm {
namespace {

constexpr int64_t kTasksAThread = 8;
// So that the last ones to finish leave little time idle.
constexpr int64_t kRows = 96;
// Of a task, and passed at a time where they are written past the caches, their part of B in L1:
// whole tiles of 6 and of 8 rows, or of 32.
constexpr int64_t kLeastLimbRank = 17;
// From this rank on a unit that multiplies tiles beats vectors. A tile's depth is 32, and memory is all that
// smaller ones wait for (one thread, bf16, ms by vectors and by tiles: rank 64 52 and 30, 32 18 and 13, 16 17
// and 20).
constexpr int64_t kFollowed = 4096;
// Bytes of a row's part from which on a core fetches rows ahead by itself: it follows one stream in a page.
// (896 columns of fp32 by tiles, one thread: asked for 3.3 ms, not 4.5; 4096 columns 52 and 49.)

// Whether tiles want even columns first.
bool apart(const Kernels& kernels, Dtype dtype) {
  return dtype == Dtype::kBf16 && kernels.merge_apart[0][0];
}

// 16 values, those at even places first.
void copy_apart(float* to, const float* from) {
  for (int i = 0; i < kPanel; i += 8, from += 8, to += 4) {
    const __m128 low = _mm_loadu_ps(from), high = _mm_loadu_ps(from + 4);
    _mm_storeu_ps(to, _mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
    _mm_storeu_ps(to + kPanel / 2, _mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
  }
}

// Columns [first, first + columns) of A as panels: whole lines are copied, since a line of A is one of
// a bundle. The last panel is filled up with zeros.
void pack_columns(float* to, const Merge& m, int64_t first, int64_t columns, int bundle, bool even_first) {
  for (int64_t at = 0; at < columns; at += bundle * kPanel) {
    const int64_t count = std::min<int64_t>(bundle * kPanel, columns - at);
    const int64_t width = ceil_div(count, kPanel) * kPanel;
    for (int64_t r = 0; r < m.rank; ++r, to += width) {
      const float* const from = m.a + r * m.d_in + first + at;
      if (even_first && count == kPanel) {
        copy_apart(to, from);
        continue;
      }
      std::memcpy(to, from, size_t(count) * sizeof(float));
      std::fill(to + count, to + width, 0.0f);
      if (even_first) {
        float values[kPanel];
        std::memcpy(values, to, sizeof values);
        copy_apart(to, values);
      }
    }
  }
}

// M = W past the caches: what is copied is read next by a forward pass, long after.
void copy_block(char* out, const char* in, int64_t bytes) {
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(out) & 63);
  std::memcpy(out, in, size_t(head));
  int64_t at = head;
  for (; at + 64 <= bytes; at += 64)
    for (int i = 0; i < 64; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + at + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at + i)));
  std::memcpy(out + at, in + at, size_t(bytes - at));
  _mm_sfence();
}

// A block of one matrix: all of it lies in columns whose part of A is packed at once.
struct Task {
  const Merge* merge;
  TileConfig config;
  int64_t first, columns;    // of W
  int64_t first_row, rows;
};

// Whether rows go elsewhere than they come from, and begin and end with a cache line.
bool whole_lines(const Merge& m, ptrdiff_t size, const char* out, const char* in) {
  return in != out && m.d_in * size % 64 == 0 && reinterpret_cast<uintptr_t>(out + m.offset * size) % 64 == 0;
}

void merge_block(const Kernels& kernels, Dtype dtype, char* out, const char* in, float sign,
                 const Task& task, const float* packed) {
  const Merge& m = *task.merge;
  const ptrdiff_t size = ptrdiff_t(size_of(dtype));
  const Panels panels{reinterpret_cast<const char*>(packed), ceil_div(task.columns, kPanel), m.rank,
                      kernels.bundle, false};
  // Past the caches where a tile writes whole lines of a row one after another. With AVX2 it writes
  // one or half of one, and then of the next row: on Zen 3 memory takes that at a half to a fifth of
  // its rate. In place, what was read is in cache and is written there.
  const bool lines = kernels.bundle > 1;
  const bool streaming = lines && whole_lines(m, size, out, in);
  Tile t{};
  t.x_stride = m.rank;
  t.out_stride = t.in_stride = m.d_in;
  t.in_ahead = task.config.prefetch * 64 / size;
  t.sign = sign;
  Walk w{};
  w.kernels = apart(kernels, dtype) ? kernels.merge_apart
              : (streaming ? kernels.merge_streaming : kernels.merge)[int(dtype)];
  w.max_rows = kernels.max_rows;
  w.most_rows = int(kFewRows);
  w.columns = std::min(task.config.expand_columns / kPanel, kernels.bundle);
  w.last = panels.count;
  w.steps = m.rank;
  w.x_row = m.rank * 4;
  w.out_row = w.in_row = m.d_in * size;
  w.out_panel = w.in_panel = kPanel * size;
  w.tail = int32_t(task.columns - (panels.count - 1) * kPanel);
  w.fetch_rows = true;
  // Else a tile's rows at a time, from end to end: as many streams as the hardware follows.
  const int64_t rows = lines ? kRows : std::min<int64_t>(kFewRows, kernels.max_rows[w.columns - 1]);
  for (int64_t row = task.first_row; row < task.first_row + task.rows; row += rows) {
    const int64_t at = m.offset + row * m.d_in + task.first;
    t.x = m.b + row * m.rank;
    t.out = out + at * size;
    t.in = in + at * size;
    w.rows = std::min(rows, task.first_row + task.rows - row);
    walk(w, panels, t);
  }
  if (streaming) _mm_sfence();
}

// Whether tiles multiply it.
bool by_limbs(const Kernels& kernels, const Merge& m) { return kernels.tiles && m.rank >= kLeastLimbRank; }

int64_t limb_depth(int64_t rank) { return ceil_div(rank, kLimbDepth) * kLimbDepth; }

// Columns of A as limbs, in place of pack_columns' panels.
int64_t limb_floats(int64_t rank, int64_t columns) {
  return ceil_div(columns, kLimbColumns) * kLimbColumns * limb_depth(rank) * kLimbs / 2;
}

// The same block by tiles.
void merge_block_by_limbs(const Kernels& kernels, Dtype dtype, char* out, const char* in, float sign,
                          const Task& task, const uint16_t* right) {
  const Merge& m = *task.merge;
  const ptrdiff_t size = ptrdiff_t(size_of(dtype));
  const int64_t depth = limb_depth(m.rank);
  const bool streaming = whole_lines(m, size, out, in);
  const auto merge = (streaming ? kernels.limbs.merge_streaming : kernels.limbs.merge)[int(dtype)];
  thread_local runtime::Scratch scratch;
  auto* const left = reinterpret_cast<uint16_t*>(scratch.get(kLimbRows * depth * kLimbs / 2));
  for (int64_t row = task.first_row; row < task.first_row + task.rows; row += kLimbRows) {
    const int rows = int(std::min<int64_t>(kLimbRows, task.first_row + task.rows - row));
    const int64_t at = m.offset + row * m.d_in + task.first;
    kernels.limbs.of_rows(m.b + row * m.rank, m.rank, rows, depth, left);
    const char* const from = in + at * size;
    const bool last = row + kLimbRows >= task.first_row + task.rows;
    const bool asked = !last && task.columns * size < kFollowed;
    const char* const next = asked ? from + kLimbRows * m.d_in * size : nullptr;
    merge({left, right, depth, rows, task.columns, from, next, out + at * size, m.d_in, sign});
  }
  if (streaming) _mm_sfence();
}

std::vector<Task> tasks_of(Dtype dtype, const Merge* merges, int64_t count, const Chooser& chooser,
                           int threads) {
  int64_t elements = 0;
  for (const Merge* m = merges; m != merges + count; ++m) elements += m->d_out * m->d_in;
  const int64_t share = ceil_div(elements, kTasksAThread * threads);
  std::vector<Task> tasks;
  for (const Merge* m = merges; m != merges + count; ++m) {
    if (!m->rank) {
      const int64_t all = m->d_out * m->d_in;
      for (int64_t at = 0; at < all; at += share)
        tasks.push_back({m, {}, at, std::min(share, all - at), 0, 1});
      continue;
    }
    const TileConfig config = chooser.choose(
        {Operation::kMerge, dtype, m->d_out, m->d_in, m->d_out, m->rank, count, threads});
    const int64_t block = std::max(kPanel, config.column_block);
    for (int64_t at = 0; at < m->d_in; at += block) {
      const int64_t columns = std::min(block, m->d_in - at);
      const int64_t rows = std::max<int64_t>(1, ceil_div(share, columns * kRows)) * kRows;
      for (int64_t row = 0; row < m->d_out; row += rows)
        tasks.push_back({m, config, at, columns, row, std::min(rows, m->d_out - row)});
    }
  }
  return tasks;
}

}  // namespace

void merge(const Kernels& kernels, Dtype dtype, void* out, const void* in, const Merge* merges,
           int64_t count, float sign, const Chooser& chooser, int threads) {
  threads = std::max(1, threads);
  const std::vector<Task> tasks = tasks_of(dtype, merges, count, chooser, threads);
  runtime::Pieces pieces{int64_t(tasks.size())};
  auto work = [&](const runtime::Team&) {
    thread_local runtime::Scratch scratch;
    const Task* last = nullptr;  // whose part of A this thread has packed
    for (int64_t i; (i = pieces.take()) >= 0;) {
      const Task& task = tasks[size_t(i)];
      if (!task.merge->rank) {
        const int64_t size = int64_t(size_of(dtype)), at = (task.merge->offset + task.first) * size;
        if (in != out)
          copy_block(static_cast<char*>(out) + at, static_cast<const char*>(in) + at,
                     task.columns * size);
        continue;
      }
      const Merge& m = *task.merge;
      const bool packs = !last || last->merge != task.merge || last->first != task.first;
      last = &task;
      char* const to = static_cast<char*>(out);
      const char* const from = static_cast<const char*>(in);
      if (by_limbs(kernels, m)) {
        thread_local runtime::LargeScratch limbs;
        auto* const right = reinterpret_cast<uint16_t*>(limbs.get(limb_floats(m.rank, task.columns)));
        if (packs)
          kernels.limbs.of_columns(m.a + task.first, m.d_in, m.rank, task.columns, limb_depth(m.rank), right);
        merge_block_by_limbs(kernels, dtype, to, from, sign, task, right);
      } else {
        float* const packed = scratch.get(ceil_div(task.columns, kPanel) * m.rank * kPanel);
        if (packs)
          pack_columns(packed, m, task.first, task.columns, kernels.bundle, apart(kernels, dtype));
        merge_block(kernels, dtype, to, from, sign, task, packed);
      }
    }
    if (kernels.tiles) kernels.tiles->release();
  };
  runtime::run_late(int(std::min<size_t>(size_t(threads), tasks.size())), work);
}

}  // namespace vlora::atmm

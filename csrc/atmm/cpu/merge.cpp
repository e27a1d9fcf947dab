// out = in + sign * B A for many matrices (§4.4.1).
#include <emmintrin.h>

#include <cstring>
#include <vector>

#include "atmm/operator.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "tile_loop.h"

namespace vlora::atmm {
namespace {

// Tasks per thread: so many that threads are idle only briefly while the last tasks finish.
constexpr int64_t kTasksPerThread = 8;

// Rows of a task: a multiple of 6, 8 and 32, the rows of the tiles. If stores bypass the caches,
// all rows of a task are computed together, and their part of B stays in L1.
constexpr int64_t kTaskRows = 96;

// Minimum rank for which AMX tiles are faster than vectors. A tile is 32 deep, and memory limits
// smaller ranks. Measured in bf16 on one thread, vectors against tiles: rank 64 takes 52 and 30 ms,
// rank 32 18 and 13 ms, rank 16 17 and 20 ms.
constexpr int64_t kMinLimbRank = 17;

// Minimum bytes of a row's part for which the hardware prefetches the next rows well: it follows
// one stream in each page. Measured in fp32 with tiles on one thread, software against hardware
// prefetch: 896 columns take 3.3 and 4.5 ms, 4096 columns 52 and 49 ms.
constexpr int64_t kHardwarePrefetchBytes = 4096;

// Whether the tiles need panels whose even columns come first.
bool wants_deinterleaved(const Kernels& kernels, Dtype dtype) {
  return dtype == Dtype::kBf16 && kernels.merge_deinterleaved[0][0];
}

// Copies one panel's 16 values, those of even columns first.
void copy_deinterleaved(float* to, const float* from) {
  for (int i = 0; i < kPanel / 2; ++i) {
    to[i] = from[2 * i];
    to[kPanel / 2 + i] = from[2 * i + 1];
  }
}

// Packs columns [first, first + columns) of A as panels. Whole lines are copied, because a line of
// A becomes a line of a bundle. The last panel is padded with zeros.
void pack_columns(float* to, const Merge& m, int64_t first, int64_t columns, int bundle,
                  bool deinterleave) {
  for (int64_t column = 0; column < columns; column += bundle * kPanel) {
    const int64_t count = std::min<int64_t>(bundle * kPanel, columns - column);
    const int64_t width = ceil_div(count, kPanel) * kPanel;
    for (int64_t r = 0; r < m.rank; ++r, to += width) {
      const float* const from = m.a + r * m.d_in + first + column;
      if (deinterleave && count == kPanel) {
        copy_deinterleaved(to, from);
        continue;
      }
      std::memcpy(to, from, size_t(count) * sizeof(float));
      std::fill(to + count, to + width, 0.0f);
      if (deinterleave) {
        float values[kPanel];
        std::memcpy(values, to, sizeof values);
        copy_deinterleaved(to, values);
      }
    }
  }
}

// Copies M = W with stores that bypass the caches, because only a later forward pass reads M.
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

// A block of one matrix. Its columns are among those whose part of A is packed together.
struct Task {
  const Merge* merge;
  TileConfig config;
  int64_t first, columns;  // columns of W; for rank 0, elements of the whole matrix
  int64_t first_row, rows;
};

// Whether the merge is out of place, and the rows of M begin and end on cache-line boundaries.
bool writes_whole_lines(const Merge& m, ptrdiff_t size, const char* out, const char* in) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(out + m.offset * size);
  return in != out && m.d_in * size % 64 == 0 && begin % 64 == 0;
}

void merge_block(const Kernels& kernels, Dtype dtype, char* out, const char* in, float sign,
                 const Task& task, const float* packed) {
  const Merge& m = *task.merge;
  const ptrdiff_t size = ptrdiff_t(size_of(dtype));
  const Panels panels{reinterpret_cast<const char*>(packed), ceil_div(task.columns, kPanel), m.rank,
                      kernels.bundle, false};
  // Stores bypass the caches if a tile writes several whole lines of a row one after another. With
  // AVX2 it writes at most one line before it continues in the next row. Streaming stores then
  // reach only a half to a fifth of the memory's rate (Zen 3). A merge in place has just read these
  // lines, so it writes them in the cache.
  const bool wide_tiles = kernels.bundle > 1;
  const bool bypasses = wide_tiles && writes_whole_lines(m, size, out, in);
  Tile t{};
  t.x_stride = m.rank;
  t.out_stride = t.in_stride = m.d_in;
  t.in_ahead = task.config.prefetch * 64 / size;
  t.sign = sign;
  TileLoop loop{};
  loop.kernels = wants_deinterleaved(kernels, dtype)
                     ? kernels.merge_deinterleaved
                     : (bypasses ? kernels.merge_streaming : kernels.merge)[int(dtype)];
  loop.kernel_rows = kernels.max_rows;
  loop.max_rows = int(kMaxDirectRows);
  loop.columns = std::min(task.config.expand_columns / kPanel, kernels.bundle);
  loop.last = panels.count;
  loop.steps = m.rank;
  loop.x_row = m.rank * 4;
  loop.out_row = loop.in_row = m.d_in * size;
  loop.out_panel = loop.in_panel = kPanel * size;
  loop.tail = int32_t(task.columns - (panels.count - 1) * kPanel);
  loop.fetch_rows = true;
  // With narrow tiles, the rows of one tile are computed from end to end before the next rows. The
  // hardware prefetches as many streams as a tile has rows.
  const int64_t rows = wide_tiles
                           ? kTaskRows
                           : std::min<int64_t>(kMaxDirectRows, kernels.max_rows[loop.columns - 1]);
  for (int64_t row = task.first_row; row < task.first_row + task.rows; row += rows) {
    const int64_t offset = m.offset + row * m.d_in + task.first;
    t.x = m.b + row * m.rank;
    t.out = out + offset * size;
    t.in = in + offset * size;
    loop.rows = std::min(rows, task.first_row + task.rows - row);
    run_tiles(loop, panels, t);
  }
  if (bypasses) _mm_sfence();
}

// Whether AMX tiles compute a merge.
bool uses_limbs(const Kernels& kernels, const Merge& m) {
  return kernels.tiles && m.rank >= kMinLimbRank;
}

int64_t limb_depth(int64_t rank) { return ceil_div(rank, kLimbDepth) * kLimbDepth; }

// Returns the floats that the limbs of columns of A take. They replace the panels of pack_columns.
int64_t limb_floats(int64_t rank, int64_t columns) {
  return ceil_div(columns, kLimbColumns) * kLimbColumns * limb_depth(rank) * kLimbs / 2;
}

// Merges a block with AMX tiles, as merge_block does with vectors.
void merge_block_by_limbs(const Kernels& kernels, Dtype dtype, char* out, const char* in,
                          float sign, const Task& task, const uint16_t* right) {
  const Merge& m = *task.merge;
  const ptrdiff_t size = ptrdiff_t(size_of(dtype));
  const int64_t depth = limb_depth(m.rank);
  const bool bypasses = writes_whole_lines(m, size, out, in);
  const auto merge = (bypasses ? kernels.limbs.merge_streaming : kernels.limbs.merge)[int(dtype)];
  thread_local runtime::Scratch scratch;
  auto* const left = reinterpret_cast<uint16_t*>(scratch.get(kLimbRows * depth * kLimbs / 2));
  for (int64_t row = task.first_row; row < task.first_row + task.rows; row += kLimbRows) {
    const int rows = int(std::min<int64_t>(kLimbRows, task.first_row + task.rows - row));
    const int64_t offset = m.offset + row * m.d_in + task.first;
    kernels.limbs.of_rows(m.b + row * m.rank, m.rank, rows, depth, left);
    const char* const from = in + offset * size;
    const bool last = row + kLimbRows >= task.first_row + task.rows;
    const bool prefetches = !last && task.columns * size < kHardwarePrefetchBytes;
    const char* const next = prefetches ? from + kLimbRows * m.d_in * size : nullptr;
    merge({left, right, depth, rows, task.columns, from, next, out + offset * size, m.d_in, sign});
  }
  if (bypasses) _mm_sfence();
}

std::vector<Task> tasks_of(Dtype dtype, const Merge* merges, int64_t count, const Chooser& chooser,
                           int threads) {
  int64_t elements = 0;
  for (const Merge* m = merges; m != merges + count; ++m) elements += m->d_out * m->d_in;
  const int64_t share = ceil_div(elements, kTasksPerThread * threads);
  std::vector<Task> tasks;
  for (const Merge* m = merges; m != merges + count; ++m) {
    if (!m->rank) {
      const int64_t total = m->d_out * m->d_in;
      for (int64_t first = 0; first < total; first += share)
        tasks.push_back({m, {}, first, std::min(share, total - first), 0, 1});
      continue;
    }
    const TileConfig config = chooser.choose(
        {Operation::kMerge, dtype, m->d_out, m->d_in, m->d_out, m->rank, count, threads});
    const int64_t block = std::max(kPanel, config.column_block);
    for (int64_t first = 0; first < m->d_in; first += block) {
      const int64_t columns = std::min(block, m->d_in - first);
      const int64_t rows = std::max<int64_t>(1, ceil_div(share, columns * kTaskRows)) * kTaskRows;
      for (int64_t row = 0; row < m->d_out; row += rows)
        tasks.push_back({m, config, first, columns, row, std::min(rows, m->d_out - row)});
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
    const Task* last = nullptr;  // the task whose part of A this thread packed last
    for (int64_t i; (i = pieces.take()) >= 0;) {
      const Task& task = tasks[size_t(i)];
      if (!task.merge->rank) {
        const int64_t size = int64_t(size_of(dtype));
        const int64_t offset = (task.merge->offset + task.first) * size;
        if (in != out)
          copy_block(static_cast<char*>(out) + offset, static_cast<const char*>(in) + offset,
                     task.columns * size);
        continue;
      }
      const Merge& m = *task.merge;
      const bool packs = !last || last->merge != task.merge || last->first != task.first;
      last = &task;
      char* const to = static_cast<char*>(out);
      const char* const from = static_cast<const char*>(in);
      if (uses_limbs(kernels, m)) {
        thread_local runtime::LargeScratch limbs;
        auto* const right =
            reinterpret_cast<uint16_t*>(limbs.get(limb_floats(m.rank, task.columns)));
        if (packs)
          kernels.limbs.of_columns(m.a + task.first, m.d_in, m.rank, task.columns,
                                   limb_depth(m.rank), right);
        merge_block_by_limbs(kernels, dtype, to, from, sign, task, right);
      } else {
        float* const packed = scratch.get(ceil_div(task.columns, kPanel) * m.rank * kPanel);
        if (packs)
          pack_columns(packed, m, task.first, task.columns, kernels.bundle,
                       wants_deinterleaved(kernels, dtype));
        merge_block(kernels, dtype, to, from, sign, task, packed);
      }
    }
  };
  runtime::run_independent(int(std::min<size_t>(size_t(threads), tasks.size())), work);
}

}  // namespace vlora::atmm

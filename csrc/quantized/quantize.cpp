#include "quantized/quantize.h"

#include <emmintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "runtime/scratch.h"
#include "runtime/threads.h"

namespace vlora::quantized {
namespace {

// Weights in a piece that one thread quantizes. This takes about 0.1 ms.
constexpr int64_t kPieceWeights = 1 << 17;
// Bytes of values in a piece of panels. Interleaving them takes about 30 µs.
constexpr int64_t kPiecePanelBytes = 128 << 10;

// Bytes of stored values in a piece. The matrix may be in memory that the kernel clears when it is
// first written, by huge pages. Threads that write to the same one would each clear it.
constexpr int64_t kPieceStoredBytes = 2 << 20;

// Writes a block whose values are in order, two in a byte, as Weight stores it.
void pack_block(const uint8_t* from, uint8_t* to) {
  const __m128i low = _mm_set1_epi8(0x0f);
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + 1);
  // Quarters 0 and 2 of the block go into low bits, quarters 1 and 3 into high bits.
  const __m128i first = _mm_unpacklo_epi64(a, b), second = _mm_unpackhi_epi64(a, b);
  const __m128i even =
      _mm_or_si128(_mm_and_si128(first, low), _mm_slli_epi16(_mm_and_si128(second, low), 4));
  const __m128i odd =
      _mm_or_si128(_mm_and_si128(_mm_srli_epi16(first, 4), low), _mm_andnot_si128(low, second));
  const __m128i left = _mm_unpacklo_epi8(even, odd), right = _mm_unpackhi_epi8(even, odd);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(left, right));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm_unpackhi_epi8(left, right));
}

// Copies rows of a panel to `to`, with the bytes of each block in the order of panels: those of its
// first 32 values, then those of its last.
void copy_halves(const uint8_t* from, int64_t bytes, uint8_t* to) {
  const __m128i low = _mm_set1_epi16(0xff);
  for (int64_t i = 0; i < bytes; i += kBlock / 2) {
    const auto* const block = reinterpret_cast<const __m128i*>(from + i);
    const __m128i a = _mm_loadu_si128(block), b = _mm_loadu_si128(block + 1);
    auto* const halves = reinterpret_cast<__m128i*>(to + i);
    _mm_storeu_si128(halves, _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low)));
    _mm_storeu_si128(halves + 1, _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
  }
}

// Changes the order of 32 values in 16 bytes from that of panels of kPanelRows rows, in which a
// byte holds value i and value 16 + i, to that of panels of kTilePanelRows rows.
void pair_values(uint8_t* values, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 16) {
    uint64_t halves[2];
    uint32_t words[4];
    std::memcpy(halves, values + i, sizeof halves);
    for (int word = 0; word < 4; ++word) {
      const uint64_t eight = halves[word % 2] >> (word < 2 ? 0 : 4) & 0x0f0f0f0f0f0f0f0f;
      // Each half of `both` has values 0 and 2 in its lowest byte, and values 1 and 3 in the next.
      const uint64_t both = eight | eight >> 12;
      words[word] = uint32_t((both & 0xff) | (both >> 24 & 0xff00) | (both << 8 & 0xff0000) |
                             (both >> 16 & 0xff000000));
    }
    std::memcpy(values + i, words, sizeof words);
  }
}

// Writes element i of each of `height` rows, then element i + 1 of each, and so on.
template <class T>
void interleave_rows(const T* rows, int64_t height, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t row = 0; row < height; ++row) to[i * height + row] = rows[row * count + i];
}

template <class T>
void interleave_in_place(T* rows, int64_t height, int64_t count, void* scratch) {
  std::memcpy(scratch, rows, size_t(height * count) * sizeof(T));
  interleave_rows(static_cast<const T*>(scratch), height, count, rows);
}

}  // namespace

int64_t quantize(const Quantization& q, int threads) {
  if (q.n <= 0 || q.k <= 0) return -1;
  const auto rows = kernels(runtime::vector_isa(Dtype::kFp32)).quantize;
  const int64_t each = std::max<int64_t>(1, kPieceWeights / q.k);
  std::atomic<int64_t> first_bad{q.n};
  runtime::share_out(threads, ceil_div(q.n, each), [&](int64_t piece) {
    const int64_t bad = rows(q, piece * each, std::min(q.n, (piece + 1) * each));
    int64_t known = first_bad.load();
    while (bad >= 0 && bad < known && !first_bad.compare_exchange_weak(known, bad)) {
    }
  });
  return first_bad < q.n ? first_bad.load() : -1;
}

void pack_int4(const uint8_t* stored, ptrdiff_t stride, int64_t bytes, uint8_t* values, int64_t n,
               int64_t row_bytes, int threads) {
  if (n <= 0 || row_bytes <= 0) return;
  constexpr int64_t kBlockBytes = kBlock / 2;
  const int64_t whole = bytes / kBlockBytes * kBlockBytes;
  const int64_t each = std::max<int64_t>(1, kPieceStoredBytes / row_bytes);
  runtime::share_out(threads, ceil_div(n, each), [&](int64_t piece) {
    for (int64_t row = piece * each; row < std::min(n, (piece + 1) * each); ++row) {
      const uint8_t* const from = stored + row * stride;
      uint8_t* const to = values + row * row_bytes;
      for (int64_t i = 0; i < whole; i += kBlockBytes) pack_block(from + i, to + i);
      if (whole == row_bytes) continue;
      uint8_t last[kBlockBytes] = {};
      std::memcpy(last, from + whole, size_t(bytes - whole));
      pack_block(last, to + whole);
    }
  });
}

void interleave(int bits, uint8_t* values, float* scales, int8_t* zeros, int64_t n,
                int64_t row_bytes, int64_t groups, int64_t panel_rows, int threads) {
  const int64_t panels = n / panel_rows, panel_bytes = panel_rows * row_bytes;
  if (panels <= 0 || row_bytes <= 0) return;
  const int64_t each = std::max<int64_t>(1, kPiecePanelBytes / panel_bytes);
  runtime::share_out(threads, ceil_div(panels, each), [&](int64_t piece) {
    static thread_local runtime::Scratch scratch;
    float* const copy = scratch.get(std::max(panel_bytes / 4, panel_rows * groups));
    for (int64_t i = piece * each; i < std::min(panels, (piece + 1) * each); ++i) {
      uint8_t* const panel = values + i * panel_bytes;
      auto* const ordered = reinterpret_cast<uint8_t*>(copy);
      if (bits == 8)
        std::memcpy(ordered, panel, size_t(panel_bytes));
      else
        copy_halves(panel, panel_bytes, ordered);
      if (bits == 4 && panel_rows == kTilePanelRows) pair_values(ordered, panel_bytes);
      interleave_rows(reinterpret_cast<const uint32_t*>(copy), panel_rows, row_bytes / 4,
                      reinterpret_cast<uint32_t*>(panel));
      interleave_in_place(scales + i * panel_rows * groups, panel_rows, groups, copy);
      if (zeros) interleave_in_place(zeros + i * panel_rows * groups, panel_rows, groups, copy);
    }
  });
}

}  // namespace vlora::quantized

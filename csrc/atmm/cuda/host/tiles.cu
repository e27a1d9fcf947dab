// Replaces the compiled tiles in the emulation: the same loop over the same problem arrays, with
// one warp per block and plain loops for the product. It also returns the emulation's counts.
#include "../kernels.cuh"

namespace vlora {
namespace {

template <typename T, bool Expand>
__global__ void grouped_kernel(Group group, int begin, int end) {
  const int last = group.first[end];
  for (int index = group.first[begin] + int(blockIdx.x); index < last; index += int(gridDim.x)) {
    const Tile t = tile_at(group, begin, end, index);
    const Problem& p = group.problems[t.problem];
    const T* const a = static_cast<const T*>(p.a) + t.from;
    const T* const b = static_cast<const T*>(p.b) + t.from;
    for (int i = t.row; i < p.m && i < t.row + group.block_rows; ++i)
      for (int j = t.column + int(threadIdx.x); j < p.n && j < t.column + group.block_columns;
           j += kWarp) {
        float sum = 0;
        for (int k = 0; k < t.depth; ++k)
          sum += to_float(a[i * p.lda + k]) * to_float(b[j * p.ldb + k]);
        const int64_t element = t.offset + i * p.ldc + j;
        if (Expand) {
          T* const c = static_cast<T*>(p.c) + element;
          *c = from_float<T>(p.alpha * sum + to_float(*c));
        } else {
          static_cast<float*>(p.c)[element] = p.alpha * sum;
        }
      }
  }
}

template <typename T, bool Expand>
Instance instance(int type, int rows, int columns) {
  return {{{rows, columns, 32}, {rows, columns, 32}, 2, type, Expand, kWarp, 0},
          [](int* resident) { return warm(grouped_kernel<T, Expand>, kWarp, 0, resident); },
          [](const Group& group, int begin, int end, int blocks, cudaStream_t stream) {
            return launch(grouped_kernel<T, Expand>, dim3(unsigned(blocks)), kWarp, 0, stream,
                          group, begin, end);
          }};
}

const Instance kTable[] = {
    instance<Half, false>(VLORA_FP16, 16, 32),   instance<Half, true>(VLORA_FP16, 16, 32),
    instance<Bfloat, false>(VLORA_BF16, 16, 32), instance<Bfloat, true>(VLORA_BF16, 16, 32),
    instance<Half, false>(VLORA_FP16, 64, 32),   instance<Half, true>(VLORA_FP16, 64, 128),
    instance<Bfloat, false>(VLORA_BF16, 64, 32), instance<Bfloat, true>(VLORA_BF16, 64, 128),
};

}  // namespace

extern const Instance* const kInstances;
extern const int kInstanceCount;
const Instance* const kInstances = kTable;
const int kInstanceCount = sizeof kTable / sizeof *kTable;

}  // namespace vlora

extern "C" emulation::Counts vlora_emulated_counts(void) { return emulation::counts(); }

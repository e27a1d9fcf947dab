// The gate of an MLP. Included after an instruction set's register and its math.h.
#pragma once

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// silu(gate) * up
VLORA_INLINE R gated(R gate, R up) {
  const R one = R::all(1.0f);
  return gate / (one + exponential(R::zero() - gate)) * up;
}

}  // namespace vlora::gemm::VLORA_ISA

// The gate of an MLP. Included after runtime/math.h.
#pragma once

namespace vlora::gemm::VLORA_ISA {

using namespace vlora::runtime::VLORA_ISA;

// Returns silu(gate) * up.
VLORA_INLINE R gated(R gate, R up) {
  const R one = R::all(1.0f);
  return gate / (one + exponential(R::zero() - gate)) * up;
}

}  // namespace vlora::gemm::VLORA_ISA

"""Linear layers that apply a different adapter to each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segments
from vlora.kernels import ops, quantized
from vlora.model.switcher import Switcher


@dataclass(eq=False)
class LoraLinear:
    """Fused projections of one layer that share their input: y = x Wᵀ + bias + LoRA by segment.

    index: index of the weight W in the views of the switcher's active weights, where each call
        looks it up, so a switch takes effect at once.
    bias: [sum of the projections' d_out], or None.
    lora: A and B of all adapters by slot. The adapter store fills and clears its slots.
    """

    switcher: Switcher
    index: int
    bias: torch.Tensor | None
    lora: LoraGroup
    _matrix: ops.Matrix | None = None

    def __call__(
        self, x: torch.Tensor, segments: Segments, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return y for all rows, [T, sum of d_out] fp32, from x, [T, d_in] fp32.

        segments: rows of each adapter, with their signs.
        out: buffer for y; allocated if None.
        """
        matrix = self._current()
        if not self.lora.has(segments):
            return matrix(x, out=out)
        epilogue = op.bind_epilogue(segments, self.lora, x)
        y = matrix(x, out=out, epilogue=epilogue)
        if epilogue is None:
            op.apply(y, x, segments, self.lora)
        return y

    def gated(
        self, x: torch.Tensor, segments: Segments, scratch: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Return `ops.gate` of all projections in `out`, [T, half the sum of d_out]. `scratch`, [T,
        sum of d_out], is overwritten.
        """
        if self.lora.has(segments):
            return ops.gate(self(x, segments, scratch), out=out)
        return self._current().gated(x, scratch=scratch, out=out)

    def _current(self) -> ops.Matrix:
        weight = self.switcher.active.views[self.index]
        if self._matrix is None or self._matrix.weight is not weight:
            if weight.shape != (self.lora.width, self.lora.d_in):
                adapters = f"adapters of shape ({self.lora.width}, {self.lora.d_in})"
                raise ValueError(f"{adapters} do not fit a matrix of shape {tuple(weight.shape)}")
            self._matrix = quantized.matrix_of(weight, self.bias)
        return self._matrix

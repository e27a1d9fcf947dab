"""Linear layers that apply a different adapter to each row."""

from __future__ import annotations

import torch

from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segments
from vlora.kernels import ops, quantized
from vlora.model.switcher import Switcher


class LoraLinear:
    """Fused projections of one layer that share their input: y = x Wᵀ + bias + LoRA by segment.

    index: index of the weight W in the views of the switcher's active weights, where each call
        looks it up, so a switch takes effect at once.
    bias: [sum of the projections' d_out], or None.
    lora: A and B of all adapters by slot. The adapter store fills and clears its slots.
    """

    def __init__(
        self, switcher: Switcher, index: int, bias: torch.Tensor | None, lora: LoraGroup
    ) -> None:
        self._switcher = switcher
        self._index = index
        self._bias = bias
        self._lora = lora
        self._matrix: ops.Matrix | None = None

    def __call__(
        self, x: torch.Tensor, segments: Segments, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return y for all rows, [T, sum of d_out] fp32, from x, [T, d_in] fp32.

        segments: rows of each adapter, with their signs.
        out: buffer for y; allocated if None.
        """
        matrix = self._current()
        if not self._lora.has(segments):
            return matrix(x, out=out)
        epilogue = op.bind_epilogue(segments, self._lora, x)
        y = matrix(x, out=out, epilogue=epilogue)
        if epilogue is None:
            op.apply(y, x, segments, self._lora)
        return y

    def gated(
        self, x: torch.Tensor, segments: Segments, scratch: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Compute all projections and return `ops.gate` of the result in `out`, [T, half the sum of
        d_out].

        scratch: buffer [T, sum of d_out] for the result before the gate; overwritten.
        """
        if self._lora.has(segments):
            return ops.gate(self(x, segments, scratch), out=out)
        return self._current().gated(x, scratch=scratch, out=out)

    def _current(self) -> ops.Matrix:
        weight = self._switcher.active.views[self._index]
        if self._matrix is None or self._matrix.weight is not weight:
            if weight.shape != (self._lora.width, self._lora.d_in):
                raise ValueError(
                    f"adapters of shape ({self._lora.width}, {self._lora.d_in}) do not fit a"
                    f" matrix of shape {tuple(weight.shape)}"
                )
            self._matrix = quantized.matrix_of(weight, self._bias)
        return self._matrix

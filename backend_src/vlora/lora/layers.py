"""Linear layers that apply a different adapter to each row."""

from __future__ import annotations

import torch

from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segments
from vlora.kernels import ops
from vlora.lora.switcher import Switcher


class LoraLinear:
    """Fused projections of one layer that share their input: y = x Wᵀ + bias + LoRA by segment.

    W is entry `index` of the switcher's active views, read at each call. `lora` holds the adapters'
    factors for each target of the group, by slot; the adapter store adds and removes slots in it.
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
        """Return y for all rows.

        x: [T, d_in] fp32.
        out: optional output.

        Returns [T, sum of the group's d_out] fp32.
        """
        matrix = self._current()
        if not self._lora.has(segments):
            return matrix(x, out=out)
        epilogue = op.bind_epilogue(segments, self._lora)
        y = matrix(x, out=out, epilogue=epilogue)
        if epilogue is None:
            op.apply(y, x, segments, self._lora)
        return y

    def gated(
        self, x: torch.Tensor, segments: Segments, scratch: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Return `ops.gate` of the product: [T, half of the group's d_out], in `out`.

        scratch: buffer for the whole product, as `out` of a call; overwritten.
        """
        if self._lora.has(segments):
            return ops.gate(self(x, segments, scratch), out=out)
        return self._current().gated(x, scratch=scratch, out=out)

    def _current(self) -> ops.Matrix:
        weight = self._switcher.active.views[self._index]
        if self._matrix is None or self._matrix.weight is not weight:
            if weight.shape != (self._lora.width, self._lora.d_in):
                raise ValueError(
                    f"adapters of {self._lora.d_in} → {self._lora.width} do not fit a matrix"
                    f" {tuple(weight.shape)}"
                )
            self._matrix = ops.Matrix(weight, self._bias)
        return self._matrix

"""A linear layer whose rows may each go through an adapter of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segment
from vlora.kernels import ops
from vlora.lora.switcher import Switcher


class LoraLinear:
    """Fused projections of one layer that share their input: y = x Wᵀ + bias + LoRA by segment.

    W is the switcher's view `index` at the time of the call. `lora` holds the adapters' pairs by
    slot, for each target of the group; it is shared with the adapter store, and grows there.
    """

    def __init__(
        self, switcher: Switcher, index: int, bias: torch.Tensor | None, lora: LoraGroup
    ) -> None:
        self._switcher = switcher
        self._index = index
        self._bias = bias
        self._lora = lora
        self._matrix: ops.Matrix | None = None

    def __call__(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """x: [T, d_in] fp32 → [T, sum of the group's d_out] fp32."""
        weight = self._switcher.active.views[self._index]
        if self._matrix is None or self._matrix.weight is not weight:
            if weight.shape != (self._lora.width, self._lora.d_in):
                raise ValueError(
                    f"adapters of {self._lora.d_in} → {self._lora.width} beside a matrix"
                    f" {tuple(weight.shape)}"
                )
            self._matrix = ops.Matrix(weight, self._bias)
        if not segments:
            return self._matrix(x)
        also = op.adding(segments, self._lora)
        y = self._matrix(x, also=also)
        if also is None:
            op.apply(y, x, segments, self._lora)
        return y

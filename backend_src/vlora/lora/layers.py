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

    def __call__(
        self, x: torch.Tensor, segments: Sequence[Segment], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [T, d_in] fp32 → [T, sum of the group's d_out] fp32, in `out` if there is one."""
        weight = self._switcher.active.views[self._index]
        if self._matrix is None or self._matrix.weight is not weight:
            self._matrix = ops.Matrix(weight, self._bias)
        y = self._matrix(x, out=out)
        if segments:
            op.apply(y, x, segments, self._lora)
        return y

"""A linear layer whose rows may each go through an adapter of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vlora.atmm import op
from vlora.atmm.types import LoraPair, Segment
from vlora.lora.slab import WeightSlab

PairsBySlot = Sequence[LoraPair | None]


class LoraLinear:
    """Fused projections of one layer that share their input: y = x Wᵀ + bias + LoRA by segment.

    Reads the slab that is active when it is called. `pairs` maps each target of the group to its
    adapters' pairs by slot; the list is shared with the adapter store.
    """

    def __init__(
        self,
        slab: WeightSlab,
        layer: int,
        group: tuple[str, ...],
        bias: torch.Tensor | None,
        pairs: Sequence[PairsBySlot],
    ) -> None:
        self._slab = slab
        self._place = slab.place(layer, *group)
        self._bias = bias
        self._pairs = pairs
        self.widths = [slab.shapes[target][0] for target in group]

    def __call__(self, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """x: [T, d_in] → [T, sum of the group's d_out]."""
        y = F.linear(x, self._place.view(self._slab.active), self._bias)
        if segments:
            for part, pairs in zip(torch.split(y, self.widths, dim=1), self._pairs, strict=True):
                op.apply(part, x, segments, pairs)
        return y

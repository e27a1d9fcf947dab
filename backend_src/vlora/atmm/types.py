"""The operator's vocabulary: segments of rows and the low-rank pairs they go through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Segment:
    """Rows `start … start + length - 1` of one step go through adapter `slot`, times `sign`.

    sign is +1 (add the row's own adapter) or −1 (take the live one out, deLoRA §4.4.2).
    """

    start: int
    length: int
    slot: int
    sign: int = 1


class LoraPair(NamedTuple):
    """a: [rank, d_in]; b: [d_out, rank] with the LoRA scale folded in. Same dtype and device."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]

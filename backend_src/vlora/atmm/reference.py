"""The operator as it reads in the paper (§4.3), in plain torch: the oracle of every fast one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.atmm.types import LoraPair, Segment


def apply(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    pairs: Sequence[LoraPair | None],
) -> None:
    """See `vlora.atmm.op.apply`."""
    for segment in segments:
        pair = pairs[segment.slot]
        if pair is None or segment.length == 0:
            continue
        rows = slice(segment.start, segment.start + segment.length)
        low_rank = x[rows] @ pair.a.T
        y[rows].add_(low_rank @ pair.b.T, alpha=segment.sign)

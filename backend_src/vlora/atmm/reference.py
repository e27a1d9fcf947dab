"""The LoRA operator in plain torch, as the paper defines it (§4.3).

The compiled backends are tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import Merges, Segment


def apply(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: LoraGroup) -> None:
    """Compute what `vlora.atmm.op.apply` specifies."""
    for part, pairs in zip(torch.split(y, list(group.d_outs), dim=1), group.pairs, strict=True):
        for segment in segments:
            pair = group.rounded(pairs[segment.slot])
            if pair is None or segment.length == 0:
                continue
            rows = slice(segment.start, segment.start + segment.length)
            low_rank = x[rows] @ pair.a.to(x.dtype).T
            part[rows].add_(low_rank @ pair.b.to(x.dtype).T, alpha=segment.sign)


def heads(y: torch.Tensor, x: torch.Tensor, segments: Sequence[Segment], group: HeadGroup) -> None:
    """Compute what `vlora.atmm.op.heads` specifies."""
    for segment in segments:
        head = group.heads[segment.slot]
        assert head is not None
        rows = slice(segment.start, segment.start + segment.length)
        y[rows, : head.weight.shape[0]] = x[rows] @ head.weight.T + head.bias


def merge(out: torch.Tensor, base: torch.Tensor, updates: Merges, sign: int) -> None:
    """Compute what `vlora.atmm.op.merge` specifies."""
    for offset, size in updates.copied:
        out[offset : offset + size] = base[offset : offset + size]
    for offset, (a, b) in updates:
        elements = slice(offset, offset + b.shape[0] * a.shape[1])
        weight = base[elements].view(b.shape[0], a.shape[1])
        out[elements] = (weight.float() + sign * (b @ a)).to(out.dtype).flatten()

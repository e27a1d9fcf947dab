"""The one LoRA operator; which implementation serves it is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlora.atmm import reference
from vlora.atmm.types import LoraPair, Segment


def apply(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    pairs: Sequence[LoraPair | None],
) -> None:
    """Add low-rank products to rows of y, in place.

    Semantics: for every segment (start, length, slot, sign), with rows R = start … start+length−1
    and (A, B) = pairs[slot]:  y[R] += sign · (x[R] Aᵀ) Bᵀ.  Rows of no segment (the base model's)
    are untouched, and a slot whose pair is None (this adapter does not target this matrix) is
    skipped. Ranks may differ from slot to slot.

    y: [T, d_out], rows may be strided. x: [T, d_in]. Segments may overlap (own and −live).
    Raises ValueError for a segment outside x, an unknown slot or a shape that does not fit.
    """
    _check(y, x, segments, pairs)
    reference.apply(y, x, segments, pairs)


def _check(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    pairs: Sequence[LoraPair | None],
) -> None:
    if y.shape[0] != x.shape[0]:
        raise ValueError(f"y has {y.shape[0]} rows, x has {x.shape[0]}")
    for segment in segments:
        if not 0 <= segment.slot < len(pairs):
            raise ValueError(f"slot {segment.slot} is not one of the {len(pairs)} adapters")
        if segment.start < 0 or segment.length < 0 or segment.start + segment.length > x.shape[0]:
            raise ValueError(f"{segment} lies outside the {x.shape[0]} rows")
        pair = pairs[segment.slot]
        if pair is not None and (
            pair.a.shape[1] != x.shape[1]
            or pair.b.shape[0] != y.shape[1]
            or pair.a.shape[0] != pair.b.shape[1]
        ):
            raise ValueError(
                f"slot {segment.slot}: A {tuple(pair.a.shape)} and B {tuple(pair.b.shape)}"
                f" do not fit x {tuple(x.shape)} and y {tuple(y.shape)}"
            )

"""Merges of all layers, M = W + B·A, which the benchmarks `switch` and `gpu_switch` time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.machine import DTYPES
from vlora.atmm.types import CopiedPart, LoraPair, MergeUpdate


@dataclass(frozen=True)
class MergeModel:
    """Layers whose targets have shapes (d_out, d_in), and an adapter of all targets with one rank.

    copied: shapes of the matrices that are fused with targets without being targets. Merging copies
        them.
    """

    name: str
    layers: int
    targets: tuple[tuple[int, int], ...]
    rank: int
    dtype: str
    copied: tuple[tuple[int, int], ...] = ()

    @property
    def elements(self) -> int:
        shapes = (*self.targets, *self.copied)
        return self.layers * sum(d_out * d_in for d_out, d_in in shapes)

    @property
    def flops(self) -> int:
        return 2 * self.rank * self.layers * sum(d_out * d_in for d_out, d_in in self.targets)

    @property
    def moved_bytes(self) -> int:
        """Bytes read (W, and A and B in fp32) and written (M, copied parts included)."""
        factors = sum(4 * (d_out + d_in) for d_out, d_in in self.targets)
        moved = 2 * DTYPES[self.dtype].itemsize * self.elements
        return moved + self.layers * self.rank * factors

    def draw(
        self, generator: torch.Generator, device: torch.device | None = None
    ) -> tuple[list[MergeUpdate], list[CopiedPart]]:
        """Return random factors for every target, and the parts that are copied."""
        updates: list[MergeUpdate] = []
        copied: list[CopiedPart] = []
        offset = 0
        for _ in range(self.layers):
            for d_out, d_in in self.copied:
                copied.append(CopiedPart(offset, d_out * d_in))
                offset += d_out * d_in
            for d_out, d_in in self.targets:
                a = torch.randn(self.rank, d_in, generator=generator) / d_in**0.5
                b = torch.randn(d_out, self.rank, generator=generator) * 1e-3
                updates.append(MergeUpdate(offset, LoraPair(a.to(device), b.to(device))))
                offset += d_out * d_in
        return updates, copied


def addmm_calls(
    updates: Sequence[MergeUpdate], base: torch.Tensor, out: torch.Tensor, rows: int | None = None
) -> list[Callable[[], object]]:
    """Return one call of torch.addmm per matrix.

    A and B are rounded to the weights' type once, at load, as in dLoRA: addmm needs one type.

    rows: number of rows of each matrix to merge; None for all.
    """
    calls: list[Callable[[], object]] = []
    for offset, (a, b) in updates:
        shape = b.shape[0], a.shape[1]
        place = slice(offset, offset + shape[0] * shape[1])
        source, target = base[place].view(shape)[:rows], out[place].view(shape)[:rows]
        a, b = a.to(base.dtype), b[:rows].to(base.dtype)
        calls.append(
            lambda source=source, target=target, a=a, b=b: torch.addmm(source, b, a, out=target)  # type: ignore[misc]
        )
    return calls

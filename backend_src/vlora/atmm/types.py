"""The operator's vocabulary: segments of rows and the weights they go through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from vlora import native

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Storage types of adapters, and the names that tables and configurations give them."""


@dataclass(frozen=True)
class Segment:
    """Rows `start … start + length - 1` of one step go through adapter `slot`, times `sign`.

    sign is +1 (add the row's own adapter) or −1 (take the live one out, deLoRA §4.4.2).
    """

    start: int
    length: int
    slot: int
    sign: int = 1


class Segments(tuple[Segment, ...]):
    """The segments of one step. Every layer of the step uses them, so the compiled core's copy is
    made once; any other sequence of segments serves as well, copied at each call."""

    @cached_property
    def native(self) -> Any:
        return native.kernels().atmm.Segments([(s.start, s.length, s.slot, s.sign) for s in self])

    @cached_property
    def slots(self) -> frozenset[int]:
        return frozenset(segment.slot for segment in self)

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """Other backends' copies, by whose they are."""
        return {}

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        return segments if isinstance(segments, cls) else cls(segments)


class LoraPair(NamedTuple):
    """a: [rank, d_in]; b: [d_out, rank] with the LoRA scale folded in. Same dtype and device."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class HeadMatrix(NamedTuple):
    """A linear layer that answers in place of the LM head: weight [classes, d_in], bias
    [classes]."""

    weight: torch.Tensor
    bias: torch.Tensor


class MergeUpdate(NamedTuple):
    """One matrix [d_out, d_in] of a slab, `offset` elements in, and the fp32 pair merged into
    it."""

    offset: int
    pair: LoraPair


class CopiedPart(NamedTuple):
    """Elements of a slab, from `offset` on, that a merge copies as they are."""

    offset: int
    size: int


class Merges(tuple[MergeUpdate, ...]):
    """An adapter's work list: its updates, and what the same call copies. Checked once, as is the
    compiled core's copy made; any other sequence of updates serves a call as well."""

    copied: tuple[CopiedPart, ...]

    def __new__(cls, updates: Iterable[MergeUpdate], copied: Iterable[CopiedPart] = ()) -> Merges:
        made = super().__new__(cls, updates)
        made.copied = tuple(copied)
        return made

    @classmethod
    def of(cls, updates: Sequence[MergeUpdate]) -> Merges:
        return updates if isinstance(updates, cls) else cls(updates)

    @cached_property
    def end(self) -> int:
        """The slab's elements up to the last one needed. ValueError for an update that is none."""
        ends = [0]
        for offset, (a, b) in self:
            fits = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1] > 0
            if not fits or offset < 0:
                shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)}"
                raise ValueError(f"{shapes} at {offset} do not fit")
            if a.dtype != torch.float32 or b.dtype != torch.float32:
                raise ValueError(f"merging needs fp32 factors, not {a.dtype} and {b.dtype}")
            if not (a.is_contiguous() and b.is_contiguous()):
                raise ValueError("merging needs contiguous factors")
            ends.append(offset + b.shape[0] * a.shape[1])
        for part in self.copied:
            if min(part) < 0:
                raise ValueError(f"{part} is no part of a slab")
            ends.append(part.offset + part.size)
        return max(ends)

    @cached_property
    def native(self) -> Any:
        """ValueError for factors that are not in the CPU's memory."""
        for _, pair in self:
            if not (pair.a.is_cpu and pair.b.is_cpu):
                raise ValueError(f"a factor on {pair.a.device}; the CPU's operator cannot read it")
        updates = [
            (offset, b.shape[0], a.shape[1], a.shape[0], a.data_ptr(), b.data_ptr())
            for offset, (a, b) in self
        ]
        return native.kernels().atmm.Merges(updates, [tuple(part) for part in self.copied])

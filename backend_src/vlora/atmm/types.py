"""Types of the operator's arguments: segments of rows, and the weights that they use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from vlora import native

# Types in which adapters are stored, with their names in tables and configurations.
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
ON_GPU = (*DTYPES, torch.float16)  # Types in which adapters are stored on a GPU.


@dataclass(frozen=True)
class Segment:
    """Rows `start … start + length - 1` of a step, to which adapter `slot` is applied.

    sign: +1 adds the rows' own adapter; −1 subtracts the live adapter (deLoRA, §4.4.2).
    """

    start: int
    length: int
    slot: int
    sign: int = 1


class Segments(tuple[Segment, ...]):
    """Segments of one step, which are converted for the compiled core only once for all layers.

    Functions also accept any other sequence of segments, and convert it at each call.
    """

    # True if a captured graph reads the segments, and will be replayed with others.
    captured: ClassVar[bool] = False

    @cached_property
    def native(self) -> Any:
        """Segments in the form that the compiled core takes."""
        return native.kernels().atmm.Segments([(s.start, s.length, s.slot, s.sign) for s in self])

    @cached_property
    def slots(self) -> frozenset[int]:
        return frozenset(segment.slot for segment in self)

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """Conversions for other backends, by the object that made them."""
        return {}

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        return segments if isinstance(segments, cls) else cls(segments)


class CapturedSegments(Segments):
    """Segments of calls that are captured in a graph. A replay reads others from device memory.

    groups: groups of weights that the graph applies. Another thread may set the first pair of a
        group at any time, so the graph must not depend on the groups' contents during the capture.
    """

    captured = True
    groups: frozenset[object]


class LoraPair(NamedTuple):
    """A and B of one matrix, of one dtype and on one device.

    a: [rank, d_in].
    b: [d_out, rank], with the LoRA scale folded in.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class HeadMatrix(NamedTuple):
    """Linear layer that replaces the LM head: weight [classes, d_in], bias [classes]."""

    weight: torch.Tensor
    bias: torch.Tensor


class MergeUpdate(NamedTuple):
    """A pair to merge into a matrix of a slab.

    offset: index of the first element of the matrix [d_out, d_in] in the slab.
    pair: A and B, fp32.
    """

    offset: int
    pair: LoraPair


class CopiedPart(NamedTuple):
    """Elements of a slab that a merge copies unchanged, from element `offset` on."""

    offset: int
    size: int


class Merges(tuple[MergeUpdate, ...]):
    """All updates of a merge, and the parts of the slab that the same call copies unchanged.

    They are checked and converted for the compiled core only once. Functions also accept any other
    sequence of updates, and convert it at each call.
    """

    copied: tuple[CopiedPart, ...]

    def __new__(cls, updates: Iterable[MergeUpdate], copied: Iterable[CopiedPart] = ()) -> Merges:
        merges = super().__new__(cls, updates)
        merges.copied = tuple(copied)
        return merges

    @classmethod
    def of(cls, updates: Sequence[MergeUpdate]) -> Merges:
        return updates if isinstance(updates, cls) else cls(updates)

    @cached_property
    def end(self) -> int:
        """Number of elements that the slab must have. Raises ValueError for an invalid part."""
        ends = [0]
        for offset, (a, b) in self:
            fits = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1] > 0
            if not fits or offset < 0:
                shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)}"
                raise ValueError(
                    f"{shapes} at offset {offset} do not fit; they must be [rank, d_in] and"
                    " [d_out, rank] at an offset of 0 or more"
                )
            if a.dtype != torch.float32 or b.dtype != torch.float32:
                raise ValueError(f"merging needs A and B in fp32, not {a.dtype} and {b.dtype}")
            if not (a.is_contiguous() and b.is_contiguous()):
                raise ValueError("merging needs contiguous A and B")
            ends.append(offset + b.shape[0] * a.shape[1])
        for part in self.copied:
            if min(part) < 0:
                raise ValueError(f"{part} is negative; it is not part of a slab")
            ends.append(part.offset + part.size)
        return max(ends)

    @cached_property
    def native(self) -> Any:
        """Updates as the compiled core takes them. Raises ValueError unless in CPU memory."""
        for _, pair in self:
            if not (pair.a.is_cpu and pair.b.is_cpu):
                raise ValueError(f"A or B is on {pair.a.device}; the CPU operator cannot read it")
        updates = [
            (offset, b.shape[0], a.shape[1], a.shape[0], a.data_ptr(), b.data_ptr())
            for offset, (a, b) in self
        ]
        return native.kernels().atmm.Merges(updates, [tuple(part) for part in self.copied])

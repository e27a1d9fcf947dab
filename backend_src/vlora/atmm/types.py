"""The operator's vocabulary: segments of rows and the weights they go through."""

from __future__ import annotations

from collections.abc import Sequence
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


class Head(NamedTuple):
    """A linear layer that answers in place of the LM head: weight [classes, d_in], bias
    [classes]."""

    weight: torch.Tensor
    bias: torch.Tensor


class MergeUpdate(NamedTuple):
    """One matrix [d_out, d_in] of a slab, `offset` elements in, and the fp32 pair merged into
    it."""

    offset: int
    pair: LoraPair

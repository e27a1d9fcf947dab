"""What one step does, decided before it is done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vlora.engine.cost import Part
from vlora.ids import BASE
from vlora.model.chunk import Chunk


class Mode(StrEnum):
    """How the rows of a step meet their adapters (§4.4): what `live` and the rows come to."""

    MERGED = "merged"
    """All rows are the live adapter's: there is nothing to add."""
    MIXTURE = "mixture"
    """Some are not: the live one is taken out of them, their own added (deLoRA)."""
    UNMERGED = "unmerged"
    """No adapter is live: each row's own is added."""


@dataclass(frozen=True)
class StepPlan:
    """Chunks in the order of their rows, that of `segments.order_of`.

    live: slot of the adapter in the active weights, or BASE for none.
    preempted: sequences whose pages were taken to make room for older ones.
    cached: tokens that those which begin found computed.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()
    live: int = BASE
    cached: int = 0

    @property
    def mode(self) -> Mode:
        if self.live == BASE:
            return Mode.UNMERGED
        own = all(chunk.slot == self.live for chunk in self.chunks)
        return Mode.MERGED if own else Mode.MIXTURE

    @property
    def parts(self) -> list[Part]:
        """What the step computes, in the cost model's terms."""
        return [Part(c.slot, c.length, c.start, c.completes) for c in self.chunks]

    @property
    def rows(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def decode_rows(self) -> int:
        return sum(chunk.decodes for chunk in self.chunks)

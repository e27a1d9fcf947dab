"""The plan of one step, decided before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vlora.engine.cost import Part
from vlora.ids import BASE
from vlora.model.chunk import Chunk


class Mode(StrEnum):
    """Inference mode of a step (§4.4); it follows from `live` and the rows."""

    MERGED = "merged"
    """All rows use the live adapter; nothing is added."""
    MIXTURE = "mixture"
    """Some rows do not: the live adapter is subtracted there and their own added (deLoRA)."""
    UNMERGED = "unmerged"
    """Each row's own adapter is added, since no adapter is live."""


@dataclass(frozen=True)
class StepPlan:
    """The decisions of one step.

    chunks: in the order of their rows, which is that of `ids.order_of`.
    preempted: ids of sequences whose pages were taken for older ones.
    live: slot of the adapter merged into the active weights, or BASE for none.
    cached: tokens of starting sequences whose keys and values came from the prefix cache.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()
    live: int = BASE
    cached: int = 0

    @property
    def mode(self) -> Mode:
        if self.live == BASE:
            return Mode.UNMERGED
        only_live = all(chunk.slot == self.live for chunk in self.chunks)
        return Mode.MERGED if only_live else Mode.MIXTURE

    @property
    def parts(self) -> list[Part]:
        """The chunks in the terms of the cost model."""
        return [Part(c.slot, c.length, c.start, c.completes) for c in self.chunks]

    @property
    def rows(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def decode_rows(self) -> int:
        """Number of rows that continue an answer."""
        return sum(chunk.decodes for chunk in self.chunks)

"""The plan of one step, which is decided before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vlora.engine.cost import Part
from vlora.ids import BASE
from vlora.model.chunk import Chunk


class Mode(StrEnum):
    """Inference mode of a step (§4.4 of the paper), by the live adapter and those of the rows."""

    MERGED = "merged"  # All rows use the live adapter, so the LoRA operator has nothing to add.
    # The operator subtracts the live adapter from other rows, and adds their own (deLoRA).
    MIXTURE = "mixture"
    UNMERGED = "unmerged"  # Each row's own adapter is added, because no adapter is live.


@dataclass(frozen=True)
class StepPlan:
    """The decisions of one step.

    chunks: one for each sequence in the step, sorted by `ids.order_of`.
    preempted: ids of the sequences that lost their pages to others.
    live: slot of the adapter that is merged into the active weights, or BASE.
    cached: tokens from the prefix cache of the sequences that begin in this step.
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
        return [Part(c.slot, len(c.tokens), c.start, c.completes) for c in self.chunks]

    @property
    def rows(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def decode_rows(self) -> int:
        return sum(chunk.decodes for chunk in self.chunks)

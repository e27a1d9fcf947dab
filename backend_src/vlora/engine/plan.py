"""The plan of one step, which is decided before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vlora.engine.cost import Part
from vlora.ids import BASE
from vlora.model.chunk import Chunk


class Mode(StrEnum):
    """Inference mode of a step (§4.4 of the paper).

    It is derived from the live adapter, which is merged into the active weights, and the adapters
    of the rows.
    """

    MERGED = "merged"  # All rows use the live adapter, so the LoRA operator has nothing to add.
    # Some rows do not use the live adapter. The LoRA operator subtracts the live adapter from these
    # rows and adds their own (deLoRA).
    MIXTURE = "mixture"
    UNMERGED = "unmerged"  # Each row's own adapter is added, because no adapter is live.


@dataclass(frozen=True)
class StepPlan:
    """The decisions of one step.

    chunks: one for each sequence in the step. Chunks of the live adapter come first, then those of
        the base model, then all others by slot (`ids.order_of`).
    preempted: ids of the sequences that lost their pages to others.
    live: slot of the adapter that is merged into the active weights, or BASE.
    cached: number of tokens taken from the prefix cache by the sequences that begin in this step.
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
        """The chunks in the form that the cost model takes."""
        return [Part(c.slot, len(c.tokens), c.start, c.completes) for c in self.chunks]

    @property
    def sampled(self) -> list[Chunk]:
        """The chunks for which a token is drawn, in the order of their rows of logits."""
        return [chunk for chunk in self.chunks if chunk.completes and not chunk.use_head]

    @property
    def rows(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def decode_rows(self) -> int:
        """Number of rows that belong to an answer, not to a prompt."""
        return sum(chunk.decodes for chunk in self.chunks)

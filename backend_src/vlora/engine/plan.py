"""What one step does, decided before it is done."""

from __future__ import annotations

from dataclasses import dataclass

from vlora.lora.segments import BASE


@dataclass(frozen=True)
class Chunk:
    """Positions `start … start + length - 1` of one sequence are computed in this step.

    completes: nothing known is left to compute afterwards, so the step answers for it.
    decodes: the chunk computes a token that the model itself has generated.
    """

    sequence_id: str
    slot: int
    start: int
    length: int
    completes: bool
    decodes: bool


@dataclass(frozen=True)
class StepPlan:
    """Chunks sorted by adapter, so that each adapter is one segment.

    live: slot of the adapter in the active weights, or BASE for none.
    preempted: sequences whose pages were taken to make room for older ones.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()
    live: int = BASE

    @property
    def rows(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def decode_rows(self) -> int:
        return sum(chunk.decodes for chunk in self.chunks)

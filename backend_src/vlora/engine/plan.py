"""What one step does, decided before it is done."""

from __future__ import annotations

from dataclasses import dataclass

from vlora.lora.segments import BASE
from vlora.model.chunk import Chunk


@dataclass(frozen=True)
class StepPlan:
    """Chunks in the order of their rows, sorted by adapter, so that each adapter is one segment.

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

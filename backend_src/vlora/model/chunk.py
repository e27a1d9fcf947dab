"""A chunk: what one step computes of one sequence, in the terms of a forward pass.

The scheduler makes it, the runner and attention read it; nothing in between has a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlora.model.inputs import Prompt


@dataclass(frozen=True)
class Chunk:
    """Rows `row … row + length - 1` of a step: positions `start … end - 1` of one sequence.

    slot: of the sequence's adapter, or BASE.
    tokens: the ids at these positions. prompt: what they come from while it lasts, with images.
    pages: the sequence's block table, which covers `end` positions.
    completes: nothing known is left to compute afterwards, so the step answers for its last row:
        with logits, or with the scores of the adapter's head where `use_head`.
    """

    sequence_id: str
    slot: int
    row: int
    start: int
    tokens: tuple[int, ...]
    prompt: Prompt
    pages: tuple[int, ...]
    completes: bool
    use_head: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Positions of the sequence that are computed once the step is done."""
        return self.start + self.length

    @property
    def last_row(self) -> int:
        return self.row + self.length - 1

    @property
    def decodes(self) -> bool:
        """Whether it computes a token that the model itself has generated."""
        return self.start >= len(self.prompt.ids)

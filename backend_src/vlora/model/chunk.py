"""A chunk: what one step computes of one sequence.

The scheduler makes chunks; the runner and the attention read them, without copies in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlora.model.inputs import Prompt


@dataclass(frozen=True)
class Chunk:
    """Rows `row … row + length - 1` of a step: positions `start … end - 1` of one sequence.

    slot: slot of the sequence's adapter, or BASE.
    tokens: token ids at these positions.
    prompt: the sequence's prompt, with its image features.
    pages: the sequence's block table, which covers at least `end` positions.
    completes: whether all known tokens are computed afterwards, so that the step returns logits for
        the last row, or the scores of the adapter's head where `use_head` is set.
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
        """Number of rows."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Number of positions of the sequence that are computed after the step."""
        return self.start + self.length

    @property
    def last_row(self) -> int:
        """Row of the step that holds the chunk's last position."""
        return self.row + self.length - 1

    @property
    def decodes(self) -> bool:
        """True if the chunk computes tokens that the model has generated."""
        return self.start >= len(self.prompt.ids)

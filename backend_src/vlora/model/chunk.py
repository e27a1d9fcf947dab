"""A chunk: the part of a step that belongs to one sequence.

The scheduler makes chunks. The runner and attention read them without copying.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vlora.model.inputs import Prompt


class Chunk(NamedTuple):
    """Rows `row … row + length - 1` of a step: positions `start … end - 1` of one sequence.

    slot: slot of the adapter of these rows, or BASE.
    tokens: token ids at these positions.
    prompt: the sequence's prompt, with its image features.
    pages: the sequence's block table, which covers at least `end` positions.
    completes: whether the chunk computes the last known token. The step then returns the logits of
        the chunk's last row.
    use_head: whether the step returns the scores of the adapter's vision task head instead of
        logits.
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
        """Number of positions of the sequence that are computed after the step."""
        return self.start + self.length

    @property
    def last_row(self) -> int:
        """Row of the step that computes the chunk's last position."""
        return self.row + self.length - 1

    @property
    def decodes(self) -> bool:
        """True if the tokens of the chunk are generated, not part of the prompt."""
        return self.start >= len(self.prompt.ids)

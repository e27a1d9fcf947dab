"""A step while the scheduler fills it with rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from vlora.engine.policies.base import Choice
from vlora.engine.sequence import Sequence
from vlora.ids import order_of
from vlora.model.chunk import Chunk


class StepBuilder:
    """A step under construction.

    rows: number of rows of each sequence.
    paused: paused sequences, in the order in which they are preempted.
    preempted: ids of the sequences that were preempted for this step.
    cached: number of tokens taken from the prefix cache.
    """

    def __init__(self, max_rows: int, choice: Choice, paused: list[Sequence]) -> None:
        self.free_rows = max_rows
        self.rows: dict[Sequence, int] = {}
        self.paused = paused
        self.preempted: list[str] = []
        self.cached = 0
        self._max_rows = choice.max_rows or {}

    def add(self, sequence: Sequence) -> None:
        """Add rows of a sequence: as many as it needs, within the limits of the policy and the
        step.
        """
        missing = sequence.next_rows
        rows = min(missing, self._max_rows.get(sequence.id, missing), self.free_rows)
        if rows:
            self.rows[sequence] = rows
            self.free_rows -= rows

    def remove_preempted(self, sequence: Sequence) -> None:
        """Remove the rows of a sequence that was preempted, and note its id."""
        self.free_rows += self.rows.pop(sequence, 0)
        self.preempted.append(sequence.id)


def chunks_of(rows: Mapping[Sequence, int], live: int) -> tuple[Chunk, ...]:
    """Return one chunk per sequence with its next positions, in the order of `ids.order_of`."""
    chunks: list[Chunk] = []
    row = 0
    by_slot: defaultdict[int, list[Sequence]] = defaultdict(list)
    for sequence in rows:
        by_slot[sequence.next_slot].append(sequence)
    for slot in sorted(by_slot, key=lambda slot: order_of(slot, live)):
        for sequence in by_slot[slot]:
            tokens, start = sequence.tokens, sequence.computed
            end = start + rows[sequence]
            chunks.append(
                Chunk(
                    sequence.id,
                    slot,
                    row,
                    start,
                    tuple(tokens[start:end]),
                    sequence.prompt,
                    tuple(sequence.table.pages),
                    completes=end == len(tokens),
                    use_head=sequence.request.use_head,
                )
            )
            row += end - start
    return tuple(chunks)

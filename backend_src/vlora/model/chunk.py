"""A prompt, and a chunk: the part of a step that belongs to one sequence.

The scheduler makes chunks. The runner and attention read them without copying.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from vlora.ids import NO_IMAGE

if TYPE_CHECKING:
    import torch


def next_position(positions: torch.Tensor) -> int:
    """Return the rotary position of the token after those at `positions`, [3, at least 1] int64."""
    # The largest of all axes decides, also for text after a clip that is longer in time than in
    # height and width. Qwen trained its models so: section 2.1 of the paper of Qwen2-VL, the code
    # that it published for tuning Qwen2.5-VL, and transformers up to 5.2. Later versions put the
    # text after such a clip at positions within it, and generated tokens after that text.
    return int(positions.max()) + 1


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt and its image features.

    ids: token ids. Each image placeholder is expanded to one token per feature row.
    feature_row: [len(ids)] int64, row of `features` that replaces the token's embedding, or
        NO_IMAGE.
    features: [rows, hidden] fp32; None without images.
    positions: [3, len(ids)] int64, rotary positions by time, height and width; None if the position
        of each token is its index.
    level_features: [levels, rows, hidden] fp32, added to the outputs of the first layers, or None.
    """

    ids: tuple[int, ...]
    feature_row: torch.Tensor
    features: torch.Tensor | None
    positions: torch.Tensor | None = None
    level_features: torch.Tensor | None = None

    @property
    def all_features(self) -> list[torch.Tensor]:
        """Features for the embedding and for each level, each [rows, hidden]; [] without images."""
        levels = () if self.level_features is None else self.level_features
        return [] if self.features is None else [self.features, *levels]

    def with_rows(self, kept: torch.Tensor) -> Prompt:
        """Return the prompt without the tokens of some rows of `features`. Others keep their
        positions.

        kept: [rows] bool. The positions must not be None.
        """
        assert self.positions is not None
        rows = self.feature_row
        stays = (rows == NO_IMAGE) | kept[rows.clamp(min=0)]
        stays[-1] = True  # Generated tokens go on after it.
        ids = tuple(compress(self.ids, stays.tolist()))
        return replace(self, ids=ids, feature_row=rows[stays], positions=self.positions[:, stays])

    @cached_property
    def position_shift(self) -> int:
        """Rotary position of a generated token minus its index in the sequence."""
        return 0 if self.positions is None else next_position(self.positions) - len(self.ids)


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

"""Closed answer sets: which tokens keep the answer on its way to one of the choices.

Works on bytes, not on one fixed tokenisation, so the model may spell a choice with whatever
tokens it prefers; a leading space is allowed and does not become part of the answer.

The work of a set is done once, not once a request or a token: requests with the same choices share
a `ChoiceSet`, and it remembers what may follow where.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from vlora.errors import InvalidArgument, shown
from vlora.model.vocabulary import Vocabulary
from vlora.request import IndexArray

KEPT_SETS = 64
"""Choice sets that are remembered; a server's applications ask with few, again and again."""

KEPT_STATES = 1024
"""States of one set whose continuations are remembered."""

UNREACHABLE = 1 << 30
"""In place of a number of tokens, where no tokens spell the rest."""

AFTER_ALL = b"\xff"
"""Sorts after every continuation: no UTF-8 text holds this byte."""


class ChoiceSet:
    """The spellings of some choices, sorted, so that those with a common beginning are neighbours.

    least_tokens: tokens that are needed, at least, for the choice that needs most.
    """

    def __init__(self, choices: Sequence[str], vocabulary: Vocabulary) -> None:
        """Raises InvalidArgument for a choice that no tokens spell."""
        self._vocabulary = vocabulary
        self.least_tokens = 0
        needed: dict[bytes, list[int]] = {}
        choice_of: dict[bytes, str] = {}
        for choice in choices:
            exact = choice.encode()
            choice_of[exact] = choice
            needed[exact] = self._needed(exact)
            if needed[exact][0] >= UNREACHABLE:
                raise InvalidArgument(f"choice {shown(choice)} cannot be spelled by this model")
            self.least_tokens = max(self.least_tokens, needed[exact][0])
        for choice in choices:
            spaced = b" " + choice.encode()
            choice_of.setdefault(spaced, choice)
            rest = needed[spaced[1:]]
            needed.setdefault(spaced, [self._fewest(spaced, 0, [0, *rest]), *rest])
        self.spellings = sorted(choice_of)
        self.choices = [choice_of[spelling] for spelling in self.spellings]
        self._needed_of = [needed[spelling] for spelling in self.spellings]
        self._next: dict[tuple[int, int, int], tuple[IndexArray, IndexArray]] = {}

    def _needed(self, spelling: bytes) -> list[int]:
        """By offset: the fewest tokens that spell the rest from there."""
        needed = [0] * (len(spelling) + 1)
        for start in range(len(spelling) - 1, -1, -1):
            needed[start] = self._fewest(spelling, start, needed)
        return needed

    def _fewest(self, spelling: bytes, start: int, needed: list[int]) -> int:
        least = UNREACHABLE
        for end in self._ends(spelling, start):
            if needed[end] < least:
                least = needed[end]
        return min(1 + least, UNREACHABLE)

    def _ends(self, spelling: bytes, start: int) -> Iterator[int]:
        """Where a token that begins at `start` can end."""
        tokens_of, size = self._vocabulary.tokens_of, len(spelling)
        for length in self._vocabulary.lengths(spelling[start : start + 2]):
            end = start + length
            if end > size:
                return
            if spelling[start:end] in tokens_of:
                yield end

    def following(self, low: int, high: int, done: int) -> tuple[IndexArray, IndexArray]:
        """Tokens, ascending, that may follow the first `done` bytes of the spellings low … high - 1
        (alike so far), and the fewest tokens that each of them leaves to be drawn."""
        key = (low, high, done)
        if key not in self._next:
            if len(self._next) >= KEPT_STATES:
                self._next.clear()
            left: dict[int, int] = {}
            for spelling, needed in zip(
                self.spellings[low:high], self._needed_of[low:high], strict=True
            ):
                for end in self._ends(spelling, done):
                    for token in self._vocabulary.tokens_of[spelling[done:end]]:
                        left[token] = min(left.get(token, UNREACHABLE), needed[end])
            tokens = np.array(sorted(left), dtype=np.int64)
            self._next[key] = tokens, np.array([left[t] for t in tokens.tolist()], dtype=np.int64)
        return self._next[key]


@lru_cache(KEPT_SETS)
def choice_set(choices: tuple[str, ...], vocabulary: Vocabulary) -> ChoiceSet:
    return ChoiceSet(choices, vocabulary)


class ChoiceMatcher:
    """State of one answer: which spellings are still possible and how far they have come.

    least_tokens: as the set's.
    """

    def __init__(self, choices: tuple[str, ...], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._set = choice_set(choices, vocabulary)
        self.least_tokens = self._set.least_tokens
        self._low, self._high = 0, len(self._set.spellings)
        self._done = 0

    @property
    def finished(self) -> str | None:
        """The choice that is spelled out and cannot be continued to another one."""
        return self.complete if self._high - self._low == 1 else None

    @property
    def complete(self) -> str | None:
        """The choice that is spelled out so far, if any: end of text would end the answer here."""
        shortest = self._set.spellings[self._low]
        return self._set.choices[self._low] if len(shortest) == self._done else None

    def allowed(self, eos_tokens: Sequence[int], budget: int) -> IndexArray:
        """Token ids, ascending, that may come next and leave a choice within `budget` tokens (this
        one counted); never empty until `finished`, if the budget was `least_tokens` at first."""
        tokens, left = self._set.following(self._low, self._high, self._done)
        allowed = tokens[left < budget]
        if self.complete is not None:
            allowed = np.union1d(allowed, np.asarray(eos_tokens, dtype=np.int64))
        return allowed

    def advance(self, token: int) -> None:
        """Takes an allowed token that is not end of text."""
        spellings = self._set.spellings
        begun = spellings[self._low][: self._done] + self._vocabulary.bytes_of[token]
        self._low = bisect_left(spellings, begun, self._low, self._high)
        self._high = bisect_left(spellings, begun + AFTER_ALL, self._low, self._high)
        self._done = len(begun)

"""The tokens that may come next in an answer that must be one of several choices.

The comparison is by bytes, so the model may spell a choice with any tokens. A leading space is
allowed and is not part of the answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from vlora.errors import InvalidArgument, shown
from vlora.model.tokenizer import Vocabulary
from vlora.request import IndexArray

# Maximum number of choice sets in the cache. Applications use few different sets.
MAX_CACHED_SETS = 64

MAX_CACHED_STATES = 1024  # Maximum number of states per set whose allowed tokens are cached.

# Number of tokens that stands for infinity, for text that no tokens can spell.
UNREACHABLE = 1 << 30

AFTER_ALL = b"\xff"  # Byte that sorts after every byte of UTF-8 text.


class ChoiceSet:
    """All spellings of some choices: each choice with and without a leading space.

    spellings: sorted, so that spellings with a common prefix are adjacent.
    choices: choice that belongs to each spelling.
    required_tokens: number of tokens that suffices for each of the choices.
    """

    def __init__(self, choices: Sequence[str], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.required_tokens = 0
        needed: dict[bytes, list[int]] = {}
        choice_of: dict[bytes, str] = {}
        for choice in choices:
            exact = choice.encode()
            choice_of[exact] = choice
            needed[exact] = self._tokens_needed(exact)
            if needed[exact][0] >= UNREACHABLE:
                raise InvalidArgument(f"choice {shown(choice)} cannot be spelled by this model")
            self.required_tokens = max(self.required_tokens, needed[exact][0])
        for choice in choices:
            spaced = b" " + choice.encode()
            choice_of.setdefault(spaced, choice)
            rest = needed[spaced[1:]]
            needed.setdefault(spaced, [self._min_tokens(spaced, 0, [0, *rest]), *rest])
        self.spellings = sorted(choice_of)
        self.choices = [choice_of[spelling] for spelling in self.spellings]
        self._needed_of = [needed[spelling] for spelling in self.spellings]
        self._cache: dict[tuple[int, int, int], tuple[IndexArray, IndexArray]] = {}

    def _tokens_needed(self, spelling: bytes) -> list[int]:
        """Return the minimum number of tokens that spell the rest from each byte offset."""
        needed = [0] * (len(spelling) + 1)
        for start in range(len(spelling) - 1, -1, -1):
            needed[start] = self._min_tokens(spelling, start, needed)
        return needed

    def _min_tokens(self, spelling: bytes, start: int, needed: list[int]) -> int:
        minimum = UNREACHABLE
        for end in self._token_ends(spelling, start):
            if needed[end] < minimum:
                minimum = needed[end]
        return min(1 + minimum, UNREACHABLE)

    def _token_ends(self, spelling: bytes, start: int) -> Iterator[int]:
        """Yield the offsets at which a token that begins at `start` can end."""
        tokens_of, size = self._vocabulary.tokens_of, len(spelling)
        for length in self._vocabulary.token_lengths(spelling[start : start + 2]):
            end = start + length
            if end > size:
                return
            if spelling[start:end] in tokens_of:
                yield end

    def following(self, low: int, high: int, done: int) -> tuple[IndexArray, IndexArray]:
        """Return the ids, ascending, of the tokens that may come after the first `done` bytes of
        spellings[low:high], which are equal up to there, and how many tokens must follow each.
        """
        key = (low, high, done)
        if key not in self._cache:
            if len(self._cache) >= MAX_CACHED_STATES:
                self._cache.clear()
            needed_after: dict[int, int] = {}
            for spelling, needed in zip(
                self.spellings[low:high], self._needed_of[low:high], strict=True
            ):
                for end in self._token_ends(spelling, done):
                    for token in self._vocabulary.tokens_of[spelling[done:end]]:
                        needed_after[token] = min(needed_after.get(token, UNREACHABLE), needed[end])
            tokens = np.array(sorted(needed_after), dtype=np.int64)
            counts = [needed_after[token] for token in tokens.tolist()]
            self._cache[key] = tokens, np.array(counts, dtype=np.int64)
        return self._cache[key]


@lru_cache(MAX_CACHED_SETS)
def choice_set(choices: tuple[str, ...], vocabulary: Vocabulary) -> ChoiceSet:
    return ChoiceSet(choices, vocabulary)


class ChoiceMatcher:
    """State of one answer: the spellings that are still possible, and the bytes so far."""

    def __init__(self, choices: tuple[str, ...], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._set = choice_set(choices, vocabulary)
        self.required_tokens = self._set.required_tokens
        self._low, self._high = 0, len(self._set.spellings)
        self._done = 0

    @property
    def finished(self) -> str | None:
        """The complete choice, if no other choice begins with it; else None."""
        return self.complete if self._high - self._low == 1 else None

    @property
    def complete(self) -> str | None:
        """The choice that the answer spells so far, or None. End of text may follow it."""
        shortest = self._set.spellings[self._low]
        return self._set.choices[self._low] if len(shortest) == self._done else None

    def allowed(self, eos_tokens: Sequence[int], budget: int) -> IndexArray:
        """Return the ids of the tokens that may come next, in ascending order.

        budget: number of tokens left for the answer, including this one. A token after which no
            choice could be completed within it is excluded. If the first budget was at least
            `required_tokens`, the result is never empty before the answer is `finished`.
        """
        tokens, needed_after = self._set.following(self._low, self._high, self._done)
        allowed = tokens[needed_after < budget]
        if self.complete is not None:
            allowed = np.union1d(allowed, np.asarray(eos_tokens, dtype=np.int64))
        return allowed

    def advance(self, token: int) -> None:
        """Add an allowed token that is not end of text."""
        spellings = self._set.spellings
        prefix = spellings[self._low][: self._done] + self._vocabulary.bytes_of[token]
        self._low = bisect_left(spellings, prefix, self._low, self._high)
        self._high = bisect_left(spellings, prefix + AFTER_ALL, self._low, self._high)
        self._done = len(prefix)

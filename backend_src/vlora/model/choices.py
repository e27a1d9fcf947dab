"""Closed answer sets: which tokens keep the answer on its way to one of the choices.

Works on bytes, not on one fixed tokenisation, so the model may spell a choice with whatever
tokens it prefers; a leading space is allowed and does not become part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlora.errors import InvalidArgument
from vlora.model.vocabulary import Vocabulary


class ChoiceMatcher:
    """State of one answer: the spellings that are still possible and how far they have come.

    least_tokens: tokens that are needed, at least, for the choice that needs most.
    """

    def __init__(self, choices: Sequence[str], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._spellings: list[tuple[str, bytes, list[int | None]]] = []
        self._done = 0
        self.least_tokens = 0
        for choice in choices:
            needed = self._needed(choice.encode())
            if needed[0] is None:
                raise InvalidArgument(f"choice {choice!r} cannot be spelled by this model")
            self.least_tokens = max(self.least_tokens, needed[0])
            self._spellings.append((choice, choice.encode(), needed))
            spaced = b" " + choice.encode()
            self._spellings.append((choice, spaced, self._needed(spaced)))

    def _needed(self, spelling: bytes) -> list[int | None]:
        """By offset: the fewest tokens that spell the rest from there; None where none do."""
        tokens_of, longest = self._vocabulary.tokens_of, self._vocabulary.longest
        needed: list[int | None] = [None] * len(spelling) + [0]
        for start in range(len(spelling) - 1, -1, -1):
            ends = range(start + 1, min(len(spelling), start + longest) + 1)
            rests = [needed[end] for end in ends if spelling[start:end] in tokens_of]
            counts = [rest for rest in rests if rest is not None]
            needed[start] = 1 + min(counts) if counts else None
        return needed

    @property
    def finished(self) -> str | None:
        """The choice that is spelled out and cannot be continued to another one."""
        continuing = any(len(spelling) > self._done for _, spelling, _ in self._spellings)
        return None if continuing else self.complete

    @property
    def complete(self) -> str | None:
        """The choice that is spelled out so far, if any: end of text would end the answer here."""
        for choice, spelling, _ in self._spellings:
            if len(spelling) == self._done:
                return choice
        return None

    def allowed(self, eos_tokens: Sequence[int], budget: int) -> list[int]:
        """Token ids that may come next and leave a choice within `budget` tokens (this one
        counted); never empty until `finished`, if the budget was `least_tokens` at first."""
        allowed = set(eos_tokens) if self.complete is not None else set()
        for _, spelling, needed in self._spellings:
            last = min(len(spelling), self._done + self._vocabulary.longest)
            for end in range(self._done + 1, last + 1):
                rest = needed[end]
                if rest is not None and rest < budget:
                    allowed.update(self._vocabulary.tokens_of.get(spelling[self._done : end], ()))
        return sorted(allowed)

    def advance(self, token: int) -> None:
        """Takes an allowed token that is not end of text."""
        spelled = self._vocabulary.bytes_of[token]
        end = self._done + len(spelled)
        self._spellings = [
            entry for entry in self._spellings if entry[1][self._done : end] == spelled
        ]
        self._done = end

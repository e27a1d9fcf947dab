"""A request as the scheduler sees it: two counters, tokens computed and tokens known.

There is no prefill phase and no decode phase: a step computes some of what is known but not yet
computed, and where it reaches the end, one more token becomes known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vlora.memory.kv import BlockTable
from vlora.request import Request

if TYPE_CHECKING:
    from vlora.model.inputs import Prompt


class Sequence:
    """tokens: known ids, the prompt's first. computed: how many have their KV in `table`.
    arrival: on the engine's clock, set when it is queued.
    waited: seconds that it was ready but not scheduled, until the last time it was."""

    def __init__(
        self, request: Request, prompt: Prompt, slot: int, max_tokens: int, table: BlockTable
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.tokens = list(prompt.ids)
        self.slot = slot
        self.max_tokens = max_tokens
        self.arrival = 0.0
        self.table = table
        self.computed = 0
        self.preemptions = 0
        self.waited = 0.0
        self._since: float | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_length(self) -> int:
        return len(self.prompt.ids)

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Known tokens whose keys and values have still to be computed."""
        return self.known - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return self.known - self.prompt_length

    @property
    def started(self) -> bool:
        """Whether it has ever been scheduled."""
        return self._since is not None

    @property
    def left(self) -> int:
        """The most it may still say: what was asked for, not what the answer will be."""
        asked = self.request.sampling.max_tokens
        most = self.max_tokens if asked is None or self.request.use_head else asked
        return max(0, most - self.output_length)

    @property
    def deadline(self) -> float:
        """On the engine's clock; infinite where there is none."""
        asked = self.request.sampling.deadline_ms
        return math.inf if asked is None else self.arrival + asked / 1e3

    def wait(self, now: float) -> float:
        """Seconds ready but not scheduled, in all: it does not grow while running, never resets."""
        return self.waited + now - (self.arrival if self._since is None else self._since)

    def scheduled(self, now: float) -> None:
        """It is part of the step that begins now."""
        self.waited, self._since = self.wait(now), now

    def ran(self, now: float) -> None:
        """The step that it was part of has ended."""
        self._since = now

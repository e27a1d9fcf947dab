"""A request as the scheduler sees it: two counters, tokens computed and tokens known.

There is no prefill phase and no decode phase: a step computes some of what is known but not yet
computed, and where it reaches the end, one more token becomes known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlora.memory.kv import BlockTable
from vlora.request import Request

if TYPE_CHECKING:
    from vlora.model.inputs import Prompt


class Sequence:
    """tokens: known ids, the prompt's first. computed: how many have their KV in `table`.
    arrival: on the engine's clock, set when it is queued."""

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

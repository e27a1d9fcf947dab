"""A request as the scheduler sees it: two counters, tokens computed and tokens known.

There is no prefill phase and no decode phase: a step computes some of what is known but not yet
computed, and where it reaches the end, one more token becomes known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vlora.engine.plan import Mode
from vlora.ids import BASE
from vlora.lora.handle import AdapterHandle
from vlora.memory.block_table import BlockTable
from vlora.memory.prefix import BlockDigests, BlockKey
from vlora.request import Request

if TYPE_CHECKING:
    from vlora.model.inputs import Prompt


SHARED_MODES = ("", "merged")
"""Modes of the weights under which blocks are shared; where a live adapter is taken out of rows
again (mixture), they are not."""


class Sequence:
    """tokens: known ids, the prompt's first. computed: how many have their KV in `table`.
    cached: how many of these were found computed when it last began.
    arrival: on the engine's clock, set when it is queued.
    waited: seconds that it was ready but not scheduled, until the last time it was."""

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        adapter: AdapterHandle | None,
        max_tokens: int,
        table: BlockTable,
        digests: BlockDigests | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        """digests: of its blocks, where they are to be shared. rounded: whether merged weights
        are."""
        self.request = request
        self.prompt = prompt
        self.tokens = list(prompt.ids)
        self.adapter = adapter
        self._pinned: AdapterHandle | None = None
        self._held: AdapterHandle | None = None
        self._digests = digests
        self._merge_is_lossy = rounded
        self._mode: str | None = ""
        self.max_tokens = max_tokens
        self.arrival = 0.0
        self.table = table
        self.computed = 0
        self.cached = 0
        self.preemptions = 0
        self.waited = 0.0
        self._since: float | None = None

    @property
    def id(self) -> str:
        return self.request.id

    # -- its adapter and pages -----------------------------------------------------------------

    @property
    def slot(self) -> int:
        """Of its adapter, which is resident; BASE for none."""
        if self.adapter is None:
            return BASE
        assert self.adapter.slot is not None, f"adapter {self.adapter.name!r} is not resident"
        return self.adapter.slot

    @property
    def ready(self) -> bool:
        """Whether a step could compute it: its adapter is resident."""
        return self.adapter is None or self.adapter.resident

    @property
    def holds_adapter(self) -> bool:
        """Whether it has started with this version of its adapter, and will end with it."""
        return self._held is not None

    def begin(self, live: int = BASE) -> None:
        """It gets pages: its adapter stays where it is, and blocks that are known are computed:
        those of the mode in which it is to run. live: the adapter in the weights of its step."""
        if self.adapter is not None:
            self.adapter.pin()
            self._pinned = self.adapter
            if self._held is None:
                self.adapter.hold()
                self._held = self.adapter
        mode = mode_of(self.slot, live, rounded=self._merge_is_lossy)
        keys = self._keys(mode, self.known - 1) if mode in SHARED_MODES else []
        self.cached = self.table.reuse_prefix(keys)
        if self.cached:
            self.computed, self._mode = self.cached, mode

    def advance(self, rows: int, mode: str = "") -> None:
        """So many more are computed. mode: of the weights, where it changes keys and values."""
        self._mode = mode if self.computed == 0 or self._mode == mode else None
        self.computed += rows
        if self._mode in SHARED_MODES and self.table.has_unshared_block(self.computed):
            self.table.share(self._keys(self._mode, self.computed))

    def leave(self) -> None:
        """It gives its pages back, and its adapter may be evicted."""
        self.table.clear()
        self.computed = 0
        if self._pinned is not None:
            self._pinned.unpin()
            self._pinned = None

    def end(self) -> None:
        self.leave()
        if self._held is not None:
            self._held.release()
            self._held = None

    def _keys(self, mode: str, length: int) -> list[BlockKey]:
        """Of the whole blocks among the first `length` tokens."""
        if self._digests is None:
            return []
        scope = _scope(self.adapter, mode)
        return [BlockKey(scope, one) for one in self._digests.up_to(self.tokens, length)]

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
    def priority(self) -> int:
        return self.request.sampling.priority

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


def mode_of(slot: int, live: int, *, rounded: bool) -> str:
    """What a mode does to a row's keys and values: nothing in fp32, else merged weights are
    rounded. slot: the row's adapter."""
    if live == BASE or not rounded:
        return ""
    return (Mode.MERGED if slot == live else Mode.MIXTURE).value


def scopes_of(adapter: AdapterHandle) -> list[str]:
    """Scopes of all blocks that were computed with it."""
    return [_scope(adapter, mode) for mode in SHARED_MODES]


def _scope(adapter: AdapterHandle | None, mode: str) -> str:
    return f"{adapter.info.digest if adapter else ''} {mode}".rstrip()

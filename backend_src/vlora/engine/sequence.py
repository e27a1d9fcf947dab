"""A request as the scheduler sees it: two counters, tokens computed and tokens known.

There is no prefill phase and no decode phase: a step computes some of the tokens that are known and
not yet computed, and where it reaches the last one, one more token becomes known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vlora.engine.plan import Mode
from vlora.engine.policies.base import Candidate
from vlora.ids import BASE
from vlora.memory.prefix import BlockKey

if TYPE_CHECKING:
    from vlora.lora.handle import AdapterHandle
    from vlora.memory.block_table import BlockTable
    from vlora.memory.prefix import BlockDigests
    from vlora.model.inputs import Prompt
    from vlora.request import Freshness, Request


SHAREABLE_MODES = ("", "merged")
"""Weight modes under which prefix blocks are shared. Blocks of mixture rows, where the live adapter
is subtracted again, are not."""


class Sequence:
    """The scheduling state of one request.

    tokens: known token ids, the prompt's first.
    prompt_length: number of tokens of the prompt.
    computed: number of tokens whose keys and values are in `table`.
    cached: how many of these came from the prefix cache when the sequence last began.
    arrival: on the engine's clock in seconds; set when the request is queued.
    started: whether it has ever been scheduled.
    preemptions: how often the sequence has lost its pages.
    """

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        adapter: AdapterHandle | None,
        max_tokens: int,
        table: BlockTable,
        digests: BlockDigests | None = None,
        *,
        longest_choice: int = 0,
        merge_is_lossy: bool = False,
    ) -> None:
        """Make a sequence that holds no pages.

        digests: digests of its blocks, if they are to be shared.
        longest_choice: number of tokens of the longest of its choices.
        merge_is_lossy: whether merged weights are rounded.
        """
        self.request = request
        self.id = request.id
        self.priority = request.sampling.priority
        deadline_ms = request.sampling.deadline_ms
        self._patience = math.inf if deadline_ms is None else deadline_ms / 1e3
        """Seconds from the arrival to the deadline."""
        self._asked_tokens = None if request.use_head else request.sampling.max_tokens
        self.prompt = prompt
        self.prompt_length = len(prompt.ids)
        self.tokens = list(prompt.ids)
        self.adapter = adapter
        self._pinned: AdapterHandle | None = None
        self._held: AdapterHandle | None = None
        self._digests = digests
        self._merge_is_lossy = merge_is_lossy
        self._mode: str | None = ""
        """Weight mode of all computed tokens, or None if they were computed under several."""
        self.max_tokens = max_tokens
        self.longest_choice = longest_choice
        self.arrival = 0.0
        self.table = table
        self.computed = 0
        self.cached = 0
        self.preemptions = 0
        self.started = False
        self._waited = 0.0
        """Seconds waited up to the last time that it was scheduled."""
        self._waiting_since: float | None = None
        """See `waiting_since`; None before it is first scheduled."""

    # -- adapter and pages -------------------------------------------------------------------

    @property
    def slot(self) -> int:
        """Slot of its adapter, which must be resident; BASE without an adapter."""
        if self.adapter is None:
            return BASE
        slot = self.adapter.slot
        assert slot is not None, f"adapter {self.adapter.name!r} is not resident"
        return slot

    @property
    def ready(self) -> bool:
        """True if a step could compute it: its adapter is resident, or it has none."""
        return self.adapter is None or self.adapter.resident

    @property
    def holds_adapter(self) -> bool:
        """True if it has started with this version of its adapter, and will end with it."""
        return self._held is not None

    def begin(self, live: int = BASE) -> None:
        """Pin the adapter and take cached prefix blocks, before pages are allocated.

        live: slot of the adapter in the weights of the next step. It decides which blocks match.
        """
        if self.adapter is not None:
            self.adapter.pin()
            self._pinned = self.adapter
            if self._held is None:
                self.adapter.hold()
                self._held = self.adapter
        mode = mode_of(self.slot, live, merge_is_lossy=self._merge_is_lossy)
        keys = self._keys(mode, self.known - 1) if mode in SHAREABLE_MODES else []
        self.cached = self.table.reuse_prefix(keys)
        if self.cached:
            self.computed, self._mode = self.cached, mode

    def advance(self, rows: int, mode: str = "") -> None:
        """Count computed rows and share the blocks that are full. mode: see `mode_of`."""
        self._mode = mode if self.computed == 0 or self._mode == mode else None
        self.computed += rows
        if self._mode in SHAREABLE_MODES and self.table.has_unshared_block(self.computed):
            self.table.share(self._keys(self._mode, self.computed))

    def leave(self) -> None:
        """Release the pages, and unpin the adapter."""
        self.table.clear()
        self.computed = 0
        if self._pinned is not None:
            self._pinned.unpin()
            self._pinned = None

    def end(self) -> None:
        """Release the pages and this version of the adapter."""
        self.leave()
        if self._held is not None:
            self._held.release()
            self._held = None

    def _keys(self, mode: str, length: int) -> list[BlockKey]:
        """Return the keys of the full blocks among the first `length` tokens."""
        if self._digests is None:
            return []
        scope = _scope(self.adapter, mode)
        return [BlockKey(scope, digest) for digest in self._digests.up_to(self.tokens, length)]

    # -- counters ----------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """Number of known tokens."""
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Number of known tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        """Token ids of the answer."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def candidate(self, now: float) -> Candidate:
        """Return what a policy sees of the sequence, whose adapter must be resident.

        Every step asks this of each candidate, so it reads fields instead of properties.
        """
        adapter, arrival, since = self.adapter, self.arrival, self._waiting_since
        tokens, computed = len(self.tokens), self.computed
        limit = self.max_tokens if self._asked_tokens is None else self._asked_tokens
        remaining = limit - tokens + self.prompt_length
        return Candidate(
            self.id,
            BASE if adapter is None else self.slot,
            arrival,
            now - (arrival if since is None else since),
            tokens - computed,
            computed,
            remaining if remaining > 0 else 0,
            bool(self.table.pages),
            arrival + self._patience,
            self.priority,
            self.request.adapter,
        )

    # -- time --------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Deadline on the engine's clock in seconds; infinity without a deadline."""
        return self.arrival + self._patience

    @property
    def waiting_since(self) -> float:
        """Time from which it would have waited as long without a break; constant while it waits."""
        return self.arrival if self._waiting_since is None else self._waiting_since

    @property
    def freshness(self) -> Freshness:
        """Arrival, deadline and stream of its request."""
        return self.request.freshness(self.arrival)

    def wait(self, now: float) -> float:
        """Return the total seconds ready but not scheduled.

        The wait does not grow while the sequence runs, and never resets.
        """
        return now - self.waiting_since

    def scheduled(self, now: float) -> None:
        """Note that the sequence is part of the step that begins now."""
        self.started = True
        self._waited = self.wait(now)

    def ran(self, now: float) -> None:
        """Note that the sequence's step has ended."""
        self._waiting_since = now - self._waited


def mode_of(slot: int, live: int, *, merge_is_lossy: bool) -> str:
    """Return the weight mode of a row: which weights computed its keys and values.

    slot: the row's adapter. live: the adapter in the weights. The mode is "" if it does not change
    keys and values, as in fp32, and otherwise the name of the mode.
    """
    if live == BASE or not merge_is_lossy:
        return ""
    return (Mode.MERGED if slot == live else Mode.MIXTURE).value


def scopes_of(adapter: AdapterHandle) -> list[str]:
    """Return the scopes of all prefix blocks that are computed with an adapter."""
    return [_scope(adapter, mode) for mode in SHAREABLE_MODES]


def _scope(adapter: AdapterHandle | None, mode: str) -> str:
    return f"{adapter.digest if adapter else ''} {mode}".rstrip()

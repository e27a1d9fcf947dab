"""A request as the scheduler sees it: two counters, tokens computed and tokens known.

There is no prefill phase and no decode phase. A step computes some of the known tokens that are not
computed yet. When it computes the last of them, one more token becomes known.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from vlora.engine.plan import Mode
from vlora.engine.policies.base import Candidate
from vlora.ids import BASE
from vlora.memory.prefix import BlockKey

if TYPE_CHECKING:
    from vlora.adapters.handle import AdapterHandle
    from vlora.memory.kv_cache import BlockTable
    from vlora.memory.prefix import BlockDigests
    from vlora.model.chunk import Prompt
    from vlora.request import Request


# Modes whose prefix blocks are shared. Those of mixture rows depend on which adapter was live,
# because it was subtracted from rounded weights.
SHAREABLE_MODES = ("", "merged")


class Sequence:
    """The scheduling state of one request.

    tokens: ids of the known tokens, first those of the prompt.
    computed: number of tokens whose keys and values are in `table`.
    cached: number of tokens that the last call of `begin` took from the prefix cache.
    base_tokens: number of leading tokens that are computed without the adapter: those before the
        last invocation of an activated LoRA in the prompt, or all without an invocation.
    held_adapter: version of the adapter that the sequence keeps until it ends, once it has begun.
    waiting_since: its arrival plus the time that it has spent in steps, so that now minus this is
        its `wait`. It is constant while the sequence waits, so queues can sort by it.
    started: whether the sequence was ever in a step.
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

        digests: digests of its blocks if they may be shared, else None.
        longest_choice: maximum number of tokens that one of the request's `choices` can need.
        merge_is_lossy: whether merged weights are rounded to a type of 16 bits.
        """
        self.request = request
        self.id = request.id
        self.priority = request.sampling.priority
        deadline_ms = request.sampling.deadline_ms
        # Seconds from the arrival to the deadline.
        self._patience = math.inf if deadline_ms is None else deadline_ms / 1e3
        self._asked_tokens = None if request.use_head else request.sampling.max_tokens
        self.prompt = prompt
        self.prompt_length = len(prompt.ids)
        self.tokens = list(prompt.ids)
        self.use_adapter(adapter)
        self.held_adapter: AdapterHandle | None = None
        self._pinned: AdapterHandle | None = None
        self._digests = digests
        self._merge_is_lossy = merge_is_lossy
        # Weight mode of all computed tokens, or None if they were computed in several modes.
        self._mode: str | None = ""
        self.max_tokens = max_tokens
        self.longest_choice = longest_choice
        self.queue_at(0.0)
        self.table = table
        self.computed = 0
        self.cached = 0
        self.started = False

    # -- adapter and pages -------------------------------------------------------------------

    def use_adapter(self, adapter: AdapterHandle | None) -> None:
        """Set the version of the adapter. The sequence must not have started."""
        self.adapter = adapter
        invocation = adapter.info.invocation if adapter else ()
        self.base_tokens = 0
        if invocation:
            start = last_occurrence(self.prompt.ids, invocation)
            self.base_tokens = sys.maxsize if start is None else start

    @property
    def slot(self) -> int:
        if self.adapter is None:
            return BASE
        slot = self.adapter.slot
        assert slot is not None, f"adapter {self.adapter.name!r} is not resident"
        return slot

    @property
    def next_slot(self) -> int:
        return BASE if self.computed < self.base_tokens else self.slot

    @property
    def next_rows(self) -> int:
        """Maximum number of rows in the next step, all with the adapter in `next_slot`."""
        missing = len(self.tokens) - self.computed
        before = self.base_tokens - self.computed
        return before if 0 < before < missing else missing

    @property
    def ready(self) -> bool:
        """True if a step can compute the sequence: its adapter, if any, is resident."""
        return self.adapter is None or self.adapter.resident

    def begin(self, live: int = BASE) -> None:
        """Pin the adapter, and reuse cached prefix blocks that match the live adapter."""
        if self.adapter is not None:
            self.adapter.pin()
            self._pinned = self.adapter
            if self.held_adapter is None:
                self.adapter.hold()
                self.held_adapter = self.adapter
        mode = mode_of(self.slot, live, merge_is_lossy=self._merge_is_lossy)
        keys = self._keys(mode, self.known - 1) if mode in SHAREABLE_MODES else []
        self.cached = self.table.reuse_prefix(keys)
        if self.cached:
            self.computed, self._mode = self.cached, mode

    def advance(self, rows: int, mode: str = "") -> None:
        """Count computed rows of this mode, and share full blocks through the prefix cache."""
        self._mode = mode if self.computed == 0 or self._mode == mode else None
        self.computed += rows
        if self._mode in SHAREABLE_MODES and self.table.has_unshared_block(self.computed):
            self.table.share(self._keys(self._mode, self.computed))

    def leave(self) -> None:
        """Release the pages and unpin the adapter. The sequence can begin again later."""
        self.table.clear()
        self.computed = 0
        if self._pinned is not None:
            self._pinned.unpin()
            self._pinned = None

    def end(self) -> None:
        """Release the pages and this version of the adapter. The sequence cannot begin again."""
        self.leave()
        if self.held_adapter is not None:
            self.held_adapter.release()
            self.held_adapter = None

    def _keys(self, mode: str, length: int) -> list[BlockKey]:
        if self._digests is None:
            return []
        digests = self._digests.up_to(self.tokens, length)
        scope, start = _scope(self.adapter, mode), self.base_tokens
        if not start:
            return [BlockKey(scope, digest) for digest in digests]
        # Blocks that end before the start of an activated LoRA are equal to those of the base
        # model. The content of all other blocks also depends on where the activated LoRA starts.
        of_base, suffix = min(len(digests), start // self._digests.block), start.to_bytes(8)
        return [
            *(BlockKey(_scope(None, mode), digest) for digest in digests[:of_base]),
            *(BlockKey(scope, digest + suffix) for digest in digests[of_base:]),
        ]

    # -- counters ----------------------------------------------------------------------------

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def missing(self) -> int:
        """Number of known tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    def candidate(self, now: float) -> Candidate:
        """Return what a policy sees of the sequence. The adapter must be resident."""
        adapter = self.adapter
        tokens, computed = len(self.tokens), self.computed
        limit = self.max_tokens if self._asked_tokens is None else self._asked_tokens
        remaining = limit - tokens + self.prompt_length
        return Candidate(
            self.id,
            BASE if adapter is None else self.slot,
            self.arrival,
            now - self.waiting_since,
            tokens - computed,
            computed,
            remaining if remaining > 0 else 0,
            bool(self.table.pages),
            self.deadline,
            self.priority,
            self.request.adapter,
        )

    def queue_at(self, arrival: float) -> None:
        self.arrival = self.waiting_since = arrival
        self.deadline = arrival + self._patience


def last_occurrence(tokens: Tokens[int], wanted: Tokens[int]) -> int | None:
    first, count = wanted[0], len(wanted)
    for start in range(len(tokens) - count, -1, -1):
        if tokens[start] == first and tuple(tokens[start : start + count]) == tuple(wanted):
            return start
    return None


def mode_of(slot: int, live: int, *, merge_is_lossy: bool) -> str:
    """Return the `Mode` of the weights that computed a row's keys and values, by its slot.

    It is "" if they equal those of unmerged weights, which is always the case in fp32.
    """
    if live == BASE or not merge_is_lossy:
        return ""
    return (Mode.MERGED if slot == live else Mode.MIXTURE).value


def scopes_of(adapter: AdapterHandle) -> list[str]:
    """Return the scopes of an adapter's prefix blocks (see `BlockKey`), one per weight mode."""
    return [_scope(adapter, mode) for mode in SHAREABLE_MODES]


def _scope(adapter: AdapterHandle | None, mode: str) -> str:
    return f"{adapter.digest if adapter else ''} {mode}".rstrip()

"""Keys and values that later prompts may begin with: whole blocks, by what they were computed from.

A block's key is a chain: its scope (whose weights computed it) and the SHA-256 of all tokens and
image features up to its end. Keys are content, so nothing that is found is ever stale. Knows
nothing of requests.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vlora.ids import NO_IMAGE
from vlora.memory.pool import Moves, PagePool

if TYPE_CHECKING:
    import torch


class BlockKey(NamedTuple):
    """scope: the adapter's language-model digest, "" for none, and where it matters the mode.
    content: digest of all that the block and those before it hold."""

    scope: str
    content: bytes


class BlockDigests:
    """The content part of a sequence's keys, one a whole block, grown as tokens become known.

    feature_row: [n] row of `features` at each position of the prompt, or NO_IMAGE; features: [rows,
    hidden] or None. Positions past the prompt hold tokens alone.
    """

    def __init__(
        self, block: int, feature_row: torch.Tensor, features: torch.Tensor | None
    ) -> None:
        self._block = block
        self._rows = feature_row.numpy()
        self._features = None if features is None else features.contiguous().numpy()
        self._digests: list[bytes] = []

    def upto(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """Of the whole blocks among the first `length` tokens."""
        whole = length // self._block
        while len(self._digests) < whole:
            start = len(self._digests) * self._block
            state = hashlib.sha256(self._digests[-1] if start else b"")
            state.update(np.asarray(tokens[start : start + self._block], np.int64).tobytes())
            rows = self._rows[start : start + self._block]
            shown = rows[rows != NO_IMAGE]
            if self._features is not None and len(shown):
                state.update(np.flatnonzero(rows != NO_IMAGE).tobytes())
                state.update(np.ascontiguousarray(self._features[shown]).data)
            self._digests.append(state.digest())
        return self._digests[:whole]


class PrefixCache:
    """Blocks by key, in pages of the pool. A block that a sequence holds is shared; one that nobody
    holds is CACHE, given up least recently used first, the ends of chains before their beginnings.
    """

    holds_runs = False

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._scopes: defaultdict[str, set[int]] = defaultdict(set)
        self._idle: OrderedDict[int, int] = OrderedDict()
        """Cached pages, least recently used first, with the time of their last use."""
        self.evictions = 0
        pool.reclaimers.append(self)
        pool.movers.append(self.moved)

    def __len__(self) -> int:
        return len(self._pages)

    def matches(self, keys: Sequence[BlockKey]) -> int:
        """How many of these first blocks are here."""
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def take(self, keys: Sequence[BlockKey]) -> list[int]:
        """The pages of the first blocks, as many as are here, held from now on."""
        pages = [self._pages[key] for key in keys[: self.matches(keys)]]
        for page in pages:
            self._idle.pop(page, None)
            self._pool.share(page)
        return pages

    def add(self, key: BlockKey, page: int) -> None:
        """A held page has become this block; where the block is here already, nothing changes."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key
            self._scopes[key.scope].add(page)

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each; what is known here stays until its room is needed."""
        now = self._pool.tick()
        for page in reversed(self._pool.release(pages, keep=self._keys)):
            self._idle[page] = now

    def age(self, scope: str) -> None:
        """What this adapter computed goes first: it has been evicted itself."""
        for page in self._scopes.get(scope, ()):
            if page in self._idle:
                self._idle[page] = 0
                self._idle.move_to_end(page, last=False)

    # -- what the pool asks ----------------------------------------------------------------------

    @property
    def spare(self) -> int:
        return len(self._idle)

    def oldest(self) -> float | None:
        return next(iter(self._idle.values()), None)

    def give_up(self) -> None:
        page, _ = self._idle.popitem(last=False)
        key = self._keys.pop(page)
        del self._pages[key]
        self._scopes[key.scope].discard(page)
        if not self._scopes[key.scope]:
            del self._scopes[key.scope]
        self._pool.drop(page)
        self.evictions += 1

    def moved(self, moves: Moves) -> None:
        """Pages have been relocated."""
        for page, to in moves.items():
            if (key := self._keys.pop(page, None)) is not None:
                self._keys[to] = key
                self._pages[key] = to
                self._scopes[key.scope].symmetric_difference_update((page, to))
        if any(page in self._idle for page in moves):
            self._idle = OrderedDict((moves.get(p, p), t) for p, t in self._idle.items())

    def clear(self) -> None:
        """Gives up all that nobody holds."""
        while self._idle:
            self.give_up()

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance."""
        assert {page: key for key, page in self._pages.items()} == self._keys
        assert len(self._idle) == self._pool.cached, (len(self._idle), self._pool.cached)
        assert all(self._pool.is_cached(page) and page in self._keys for page in self._idle)
        by_scope = {page for pages in self._scopes.values() for page in pages}
        assert by_scope == set(self._keys)

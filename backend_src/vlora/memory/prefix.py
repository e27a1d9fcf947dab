"""Prefix cache: keys and values of whole blocks, which later prompts with the same beginning reuse.

The key of a block names its content, so a cached block is never stale.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vlora.ids import NO_IMAGE
from vlora.memory.pool import EVICT_FIRST, Moves, Owner, PagePool

if TYPE_CHECKING:
    import torch


class BlockKey(NamedTuple):
    """Key of one block.

    scope: digest of the adapter's weights ("" for the base model), followed by the weight mode if
        that changes keys and values.
    content: chained SHA-256 of all that the forward pass reads of the prompt up to the end of the
        block, followed by the position where an activated LoRA starts if it changes the block.
    """

    scope: str
    content: bytes


class BlockDigests:
    """Content digests of a sequence's whole blocks, computed as their tokens become known.

    A digest covers tokens, image features and rotary positions, all of which a client determines.
    The positions of generated tokens follow from those of the whole prompt.

    block: number of tokens per block.
    feature_row: [n] row of the features at each position of the prompt, or NO_IMAGE.
    features: for the embedding and each level, [rows, hidden] image features of the prompt.
    positions: [3, n] rotary positions of the prompt; None if they are the tokens' indices.
    salt: name of the tenant, whose blocks no other tenant shares.
    """

    def __init__(
        self,
        block: int,
        feature_row: torch.Tensor,
        features: Sequence[torch.Tensor] = (),
        positions: torch.Tensor | None = None,
        salt: str | None = None,
    ) -> None:
        self.block = block
        self._feature_row = feature_row.numpy()
        self._features = [level.contiguous().numpy() for level in features]
        self._positions = None if positions is None else positions.numpy()
        self._salt = b"" if salt is None else salt.encode()
        self._digests: list[bytes] = []

    def up_to(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """Return the digests of the whole blocks within the first `length` tokens."""
        blocks = length // self.block
        while len(self._digests) < blocks:
            start = len(self._digests) * self.block
            state = hashlib.sha256(self._digests[-1] if start else self._salt)
            state.update(np.asarray(tokens[start : start + self.block], np.int64).tobytes())
            rows = self._feature_row[start : start + self.block]
            image_rows = rows[rows != NO_IMAGE]
            if len(image_rows):
                state.update(np.flatnonzero(rows != NO_IMAGE).tobytes())
                for level in self._features:
                    state.update(np.ascontiguousarray(level[image_rows]).data)
            if self._positions is not None:
                positions = self._positions[:, start : start + self.block]
                state.update(np.ascontiguousarray(positions).data)
            self._digests.append(state.digest())
        return self._digests[:blocks]


class PrefixCache:
    """Cached blocks by key, each in a page of the pool.

    While sequences hold a block, the pool counts its page as KV. When none does, the page counts as
    CACHE, and the block can be evicted.

    is_finite: returns whether the content of pages is finite. Callers check it before `add`.
    """

    def __init__(
        self, pool: PagePool, is_finite: Callable[[Sequence[int]], bool] = lambda pages: True
    ) -> None:
        self._pool = pool
        self.is_finite = is_finite
        self._pages: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._scopes: defaultdict[str, set[int]] = defaultdict(set)
        # Pages that can be evicted, with the time of their last use, the next to evict first.
        self._idle: OrderedDict[int, int] = OrderedDict()
        self.evictions = 0
        pool.evictors.append(self)
        pool.movers.append(self.relocate)

    def __len__(self) -> int:
        return len(self._pages)

    def count_matching(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading blocks that are in the cache."""
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def acquire(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the pages of the leading blocks that are cached. Each gets another holder."""
        pages = [self._pages[key] for key in keys[: self.count_matching(keys)]]
        for page in pages:
            self._idle.pop(page, None)
            self._pool.share(page)
        return pages

    def add(self, key: BlockKey, page: int) -> None:
        """Record that a held page contains this block, unless another page contains it already."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key
            self._scopes[key.scope].add(page)

    def discard(self, pages: Sequence[int]) -> None:
        """Remove the blocks in these pages from the cache, so that no other sequence gets them."""
        for page in pages:
            if page in self._keys:
                self._forget(page)
            if self._idle.pop(page, None) is not None:
                self._pool.drop(page)

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page)
        del self._pages[key]
        self._scopes[key.scope].discard(page)
        if not self._scopes[key.scope]:
            del self._scopes[key.scope]

    def release(self, pages: Sequence[int]) -> None:
        """Remove one holder of each page. Pages without a cached block become free."""
        now = self._pool.tick()
        # Of pages that are released together, the last one is evicted first.
        for page in reversed(self._pool.release(pages, keep=self._keys)):
            self._idle[page] = now

    def evict_first(self, scope: str) -> None:
        """Mark the idle blocks of a scope, whose adapter is evicted, as the first to evict."""
        for page in self._scopes.get(scope, ()):
            if page in self._idle:
                self._idle[page] = EVICT_FIRST
                self._idle.move_to_end(page, last=False)

    # -- called by the pool ----------------------------------------------------------------------

    def evictable_pages(self, enough: int) -> int:
        return len(self._idle)

    def oldest_use(self) -> int | None:
        return next(iter(self._idle.values()), None)

    def evict_oldest(self) -> None:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
        self._pool.drop(page)
        self.evictions += 1

    def relocate(self, moves: Moves) -> None:
        """Update the page numbers after the content of pages was moved."""
        for page, to in moves.items():
            if (key := self._keys.pop(page, None)) is not None:
                self._keys[to] = key
                self._pages[key] = to
                self._scopes[key.scope].symmetric_difference_update((page, to))
        if not self._idle.keys().isdisjoint(moves):
            renamed = ((moves.get(page, page), used) for page, used in self._idle.items())
            self._idle = OrderedDict(renamed)

    def check_integrity(self) -> None:
        """Raise AssertionError if the tables are inconsistent with each other or with the pool."""
        assert {page: key for key, page in self._pages.items()} == self._keys
        assert len(self._idle) == self._pool.cached, (len(self._idle), self._pool.cached)
        assert self._idle.keys() <= self._keys.keys()
        assert all(self._pool.owner(page) is Owner.CACHE for page in self._idle)
        assert {page for pages in self._scopes.values() for page in pages} == set(self._keys)

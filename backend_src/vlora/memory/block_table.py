"""Block tables: which pages hold the keys and values of a sequence, in order of position."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.memory.pool import Moves, PagePool
from vlora.memory.prefix import BlockKey, PrefixCache


class BlockTable:
    """Pages of one sequence; position p lies in `pages[p // block_size]`, at `p % block_size`.

    Holds its pages until `clear`; those of whole blocks that `prefix` knows are shared.
    """

    def __init__(self, pool: PagePool, block_size: int, prefix: PrefixCache | None = None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._prefix = prefix
        self._known = 0
        self.pages: list[int] = []

    def begin(self, keys: Sequence[BlockKey]) -> int:
        """An empty table takes the cached pages of the first blocks: positions that are computed
        so. keys: of whole blocks, in order."""
        assert not self.pages, "begun twice"
        if self._prefix is not None:
            self.pages = self._prefix.take(keys)
        self._known = len(self.pages)
        return self._known * self._block_size

    def has_news(self, computed: int) -> bool:
        """Whether so many computed tokens fill a block that is not shared yet."""
        return self._prefix is not None and computed // self._block_size > self._known

    def computed(self, keys: Sequence[BlockKey]) -> None:
        """The first `len(keys)` blocks are computed, for others to share."""
        if self._prefix is not None:
            for index in range(self._known, len(keys)):
                self._prefix.add(keys[index], self.pages[index])
            self._known = max(self._known, len(keys))

    def grow(self, tokens: int) -> bool:
        """Room for `tokens` tokens in all; False (and nothing taken) where pages are short."""
        missing = pages_for(tokens, self._block_size) - len(self.pages)
        if missing <= 0:
            return True
        pages = self._pool.allocate(missing)
        if pages is None:
            return False
        self.pages.extend(pages)
        return True

    def moved(self, moves: Moves) -> None:
        """Pages have been relocated."""
        self.pages = [moves.get(page, page) for page in self.pages]

    def clear(self) -> None:
        if self._prefix is None:
            self._pool.release(self.pages)
        else:
            self._prefix.release(self.pages)
        self.pages = []
        self._known = 0


def pages_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)

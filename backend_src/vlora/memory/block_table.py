"""Block table of a sequence: the pages that hold its keys and values, in order of position."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.memory.pool import Moves, PagePool
from vlora.memory.prefix import BlockKey, PrefixCache


class BlockTable:
    """Pages of one sequence. Position p is in `pages[p // block_size]`, at index `p % block_size`.

    The table holds its pages until `clear`. Pages with whole blocks may be shared with other tables
    through the prefix cache.
    """

    def __init__(self, pool: PagePool, block_size: int, prefix: PrefixCache | None = None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._prefix = prefix
        self._shared_blocks = 0
        self.pages: list[int] = []

    def reuse_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Fill an empty table with the cached pages of its first blocks.

        keys: keys of the sequence's whole blocks, in order.

        Returns the number of positions whose keys and values these pages contain.
        """
        assert not self.pages, "the table is not empty"
        if self._prefix is not None:
            self.pages = self._prefix.acquire(keys)
        self._shared_blocks = len(self.pages)
        return self._shared_blocks * self._block_size

    def has_unshared_block(self, computed: int) -> bool:
        """Return whether `computed` tokens fill a block that is not in the prefix cache yet."""
        return self._prefix is not None and computed // self._block_size > self._shared_blocks

    def share(self, keys: Sequence[BlockKey]) -> None:
        """Add the first `len(keys)` blocks, which must be computed, to the prefix cache.

        Blocks that this table has shared before stay in the cache. If one of the other blocks
        contains a value that is not finite, no block is added.
        """
        if self._prefix is None:
            return
        if self._prefix.is_finite(self.pages[self._shared_blocks : len(keys)]):
            for index in range(self._shared_blocks, len(keys)):
                self._prefix.add(keys[index], self.pages[index])
            self._shared_blocks = max(self._shared_blocks, len(keys))

    def discard_shared(self) -> None:
        """Remove all blocks of this table from the prefix cache; the table keeps its pages."""
        if self._prefix is not None:
            self._prefix.discard(self.pages)

    def fits(self, tokens: int, released: int) -> bool:
        """Return whether `grow` could succeed if other tables first released `released` pages."""
        missing = pages_for(tokens, self._block_size) - len(self.pages)
        return self._pool.can_allocate(missing - released)

    def grow(self, tokens: int) -> bool:
        """Allocate pages until the table has enough for `tokens` tokens.

        Returns False, and allocates nothing, if there are too few pages.
        """
        missing = pages_for(tokens, self._block_size) - len(self.pages)
        if missing <= 0:
            return True
        pages = self._pool.allocate(missing)
        if pages is None:
            return False
        self.pages.extend(pages)
        return True

    def relocate(self, moves: Moves) -> None:
        """Update the page numbers after the content of pages was moved to other pages."""
        self.pages = [moves.get(page, page) for page in self.pages]

    def clear(self) -> None:
        if self._prefix is None:
            self._pool.release(self.pages)
        else:
            self._prefix.release(self.pages)
        self.pages = []
        self._shared_blocks = 0


def pages_for(tokens: int, block_size: int) -> int:
    """Return the number of pages that `tokens` tokens need."""
    return -(-tokens // block_size)

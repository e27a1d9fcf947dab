"""Block tables: which pages hold the keys and values of a sequence, in order of position."""

from __future__ import annotations

from vlora.memory.pool import PagePool


class BlockTable:
    """Pages of one sequence; position p lies in `pages[p // block_size]`, at `p % block_size`.

    Owns its pages until `clear`.
    """

    def __init__(self, pool: PagePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.pages: list[int] = []

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

    def clear(self) -> None:
        self._pool.release(self.pages)
        self.pages = []


def pages_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)

"""The page pool: who owns which page. Pure bookkeeping; the bytes are the runner's.

Invariant: free + used = total, and no page has two owners.
"""

from __future__ import annotations


class PagePool:
    """Hands out pages 0..total-1. A page belongs to its caller from `allocate` to `release`."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        assert self.free + self.used == self.total, (self.free, self.used, self.total)
        assert len(set(self._free)) == self.free, "a free page is listed twice"
        assert self._used.isdisjoint(self._free), "a page is both free and used"

"""The page pool: one region, pages of one size, and who owns which. Pure bookkeeping; the bytes are
the store's (`memory/store.py`).

A page is free, or holds keys and values of running sequences (KV, counted by how many share it),
or such that nobody runs on but a later prompt may begin with (CACHE), or a part of an adapter
(ADAPTER). KV is taken from the region's end, an adapter's run of neighbouring pages from its
beginning, so that they meet late.

**Invariant:** free + KV + adapter + cached = total, and a page has one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Owner(IntEnum):
    FREE = 0
    KV = 1
    CACHE = 2
    ADAPTER = 3


@dataclass(frozen=True)
class Run:
    """Neighbouring pages `first … first + count - 1`, one adapter's."""

    first: int
    count: int

    @staticmethod
    def length(packed: int, page: int) -> int:
        """Pages that so many bytes take, of pages of so many."""
        return max(1, -(-packed // page))

    @property
    def pages(self) -> range:
        return range(self.first, self.first + self.count)


class Reclaimer(Protocol):
    """Holds pages that it can do without: cached blocks, or idle adapters, in runs."""

    @property
    def holds_runs(self) -> bool: ...

    def oldest(self) -> float | None:
        """When what it would give up next was last used, on the pool's clock; None: nothing."""
        ...

    def give_up(self) -> None:
        """Frees that."""
        ...

    @property
    def spare(self) -> int:
        """Pages that it could give up in all."""
        ...


Moves = Mapping[int, int]
"""Page → where its content goes."""


class PagePool:
    """Pages 0..total-1. What is taken belongs to the caller until it is given back.

    reclaimers: asked, the longest unused first, where free pages are short. movers: told of every
    relocation, in order, before the pages have new owners: who knows page numbers rewrites them.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        self.total = total
        self._owner = bytearray(total)
        self._refs = [0] * total
        self._counts = {Owner.FREE: total, Owner.KV: 0, Owner.CACHE: 0, Owner.ADAPTER: 0}
        self._ticks = 0
        self.moved = 0
        """Pages relocated so far."""
        self.reclaimers: list[Reclaimer] = []
        self.movers: list[Callable[[Moves], None]] = []

    @property
    def free(self) -> int:
        return self._counts[Owner.FREE]

    @property
    def kv(self) -> int:
        return self._counts[Owner.KV]

    @property
    def cached(self) -> int:
        return self._counts[Owner.CACHE]

    @property
    def adapter(self) -> int:
        return self._counts[Owner.ADAPTER]

    @property
    def used(self) -> int:
        """Pages that are not there for the asking: keys and values of running sequences."""
        return self.kv

    def has_room(self, count: int) -> bool:
        """Whether so many pages are free, or would be for the asking."""
        return count <= self.free or count <= self.free + sum(one.spare for one in self.reclaimers)

    def has_room_for_run(self, count: int, beside: int = 0) -> bool:
        """Whether an adapter's run of so many pages leaves so many for keys and values."""
        return self.has_room(count + beside)

    def tick(self) -> int:
        """The pool's clock: each use is later than all before."""
        self._ticks += 1
        return self._ticks

    # -- keys and values -----------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages for keys and values, one holder each; None (and nothing taken) where not
        even all that can be reclaimed would do."""
        if not self._make_room(count):
            return None
        pages = []
        end = self.total
        for _ in range(count):
            end = self._owner.rfind(Owner.FREE, 0, end)
            pages.append(end)
            self._become(end, Owner.KV)
            self._refs[end] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held, or cached."""
        assert self._owner[page] in (Owner.KV, Owner.CACHE), f"page {page} holds no keys"
        self._become(page, Owner.KV)
        self._refs[page] += 1

    def release(self, pages: Iterable[int], keep: Container[int] = ()) -> list[int]:
        """One holder less; a page without any becomes cached where it is in `keep`, else free. The
        pages that became cached."""
        kept = []
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is held by nobody"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._become(page, Owner.CACHE if page in keep else Owner.FREE)
                if page in keep:
                    kept.append(page)
        return kept

    def drop(self, page: int) -> None:
        """A cached page becomes free."""
        assert self._owner[page] == Owner.CACHE, f"page {page} is not cached"
        self._become(page, Owner.FREE)

    def is_held(self, page: int) -> bool:
        return self._owner[page] == Owner.KV

    def is_cached(self, page: int) -> bool:
        return self._owner[page] == Owner.CACHE

    # -- adapters --------------------------------------------------------------------------------

    def allocate_run(self, count: int) -> Run | None:
        """Neighbouring pages for an adapter; None where other adapters leave no room for it.

        Where free pages are enough but apart, keys and values in the way are moved.
        """
        if count < 1:
            raise ValueError(f"a run has at least one page, not {count}")
        if not self._make_room(count):
            return None
        first = self._owner.find(bytes(count))
        if first < 0:
            found = self._window(count)
            while found is None and self._reclaim([r for r in self.reclaimers if r.holds_runs]):
                found = self._window(count)
            if found is None:
                return None
            first = found
            self._empty(range(first, first + count))
        for page in range(first, first + count):
            self._become(page, Owner.ADAPTER)
        return Run(first, count)

    def release_run(self, run: Run) -> None:
        for page in run.pages:
            assert self._owner[page] == Owner.ADAPTER, f"page {page} is no adapter's"
            self._become(page, Owner.FREE)

    def _window(self, count: int) -> int | None:
        """Where a run costs the fewest moves; None where adapters lie in every one."""
        best: tuple[int, int] | None = None
        start = 0
        while start + count <= self.total:
            blocked = self._owner.rfind(Owner.ADAPTER, start, start + count)
            if blocked >= 0:
                start = blocked + 1
                continue
            moves = count - self._owner.count(Owner.FREE, start, start + count)
            if best is None or moves < best[0]:
                best = (moves, start)
            start += 1
        return None if best is None else best[1]

    def _empty(self, window: range) -> None:
        """Moves what lies in the window elsewhere; free pages outside are enough."""
        moves: dict[int, int] = {}
        end = self.total
        for page in window:
            if self._owner[page] == Owner.FREE:
                continue
            end = self._owner.rfind(Owner.FREE, 0, end)
            while end in window:
                end = self._owner.rfind(Owner.FREE, 0, window.start)
            moves[page] = end
        for mover in self.movers:
            mover(moves)
        for page, to in moves.items():
            self._become(to, Owner(self._owner[page]))
            self._refs[to], self._refs[page] = self._refs[page], 0
            self._become(page, Owner.FREE)
        self.moved += len(moves)

    # -- inside ----------------------------------------------------------------------------------

    def _make_room(self, count: int) -> bool:
        """`count` free pages, at the cost of what has been unused for longest."""
        if not self.has_room(count):
            return False
        while self.free < count:
            if not self._reclaim(self.reclaimers):
                return False
        return True

    def _reclaim(self, whose: Sequence[Reclaimer]) -> bool:
        """The longest unused goes; False where there is nothing."""
        found = [(one.oldest(), index) for index, one in enumerate(whose)]
        ages = [(age, index) for age, index in found if age is not None]
        if not ages:
            return False
        whose[min(ages)[1]].give_up()
        return True

    def _become(self, page: int, owner: Owner) -> None:
        self._counts[Owner(self._owner[page])] -= 1
        self._counts[owner] += 1
        self._owner[page] = owner

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance."""
        for owner, count in self._counts.items():
            assert self._owner.count(owner) == count, f"{owner.name}: {count} by the books"
        assert self.free + self.kv + self.adapter + self.cached == self.total
        for page, refs in enumerate(self._refs):
            owner = Owner(self._owner[page])
            assert (refs > 0) == (owner == Owner.KV), f"page {page}: {refs} holders, {owner.name}"

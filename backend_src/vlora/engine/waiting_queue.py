"""The waiting sequences of a scheduler, sorted in each order that a policy may read."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vlora.engine.policies.base import Order
from vlora.engine.sequence import Sequence

if TYPE_CHECKING:
    from vlora.lora.handle import AdapterHandle


class _SortedSequences:
    """Sequences in ascending order of a key, which must not change while a sequence waits."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._keys: list[Any] = []
        self.items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        key = self._key(sequence)
        index = bisect.bisect_right(self._keys, key)
        self._keys.insert(index, key)
        self.items.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; raise ValueError if it is missing."""
        first = bisect.bisect_left(self._keys, self._key(sequence))
        index = self.items.index(sequence, first)
        del self._keys[index], self.items[index]

    def first_ready(
        self, count: int, arrival_cutoff: float, resident: dict[AdapterHandle, bool]
    ) -> list[Sequence]:
        """Return the first `count` ready sequences that arrived by `arrival_cutoff`.

        resident: cache of `AdapterHandle.resident`, which this call extends. The search may read
            the whole queue if few adapters are resident.
        """
        found: list[Sequence] = []
        for sequence in self.items:
            adapter = sequence.adapter
            if adapter is not None:
                ready = resident.get(adapter)
                if ready is None:
                    ready = resident[adapter] = adapter.resident
                if not ready:
                    continue
            if sequence.arrival <= arrival_cutoff:
                found.append(sequence)
                if len(found) == count:
                    break
        return found


class WaitingQueue:
    """Sequences without pages, sorted in each `Order`."""

    def __init__(self) -> None:
        self._orders = {
            Order.ARRIVAL: _SortedSequences(_arrival),
            Order.WAIT: _SortedSequences(lambda s: s.waiting_since),
            Order.PRIORITY: _SortedSequences(lambda s: (s.priority, s.arrival)),
            Order.DEADLINE: _SortedSequences(lambda s: s.deadline),
        }
        self._by_adapter: dict[AdapterHandle, _SortedSequences] = {}
        """The sequences of each adapter, in order of arrival. Adapters without sequences are left
        out.
        """

    @property
    def by_arrival(self) -> list[Sequence]:
        """All sequences in order of arrival. Do not modify the list."""
        return self._orders[Order.ARRIVAL].items

    def add(self, sequence: Sequence) -> None:
        for order in self._orders_of(sequence):
            order.add(sequence)
        self._add_to_adapter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; raise ValueError if it is not waiting."""
        for order in self._orders_of(sequence):
            order.remove(sequence)
        self._remove_from_adapter(sequence)

    def use_adapter(self, sequence: Sequence, adapter: AdapterHandle | None) -> None:
        """Set the adapter of a sequence in the queue; None for the base model."""
        self._remove_from_adapter(sequence)
        sequence.use_adapter(adapter)
        self._add_to_adapter(sequence)

    def first_of_each_adapter(self) -> dict[AdapterHandle, Sequence]:
        """Return the first sequence of each adapter, in order of arrival."""
        firsts = ((adapter, held.items[0]) for adapter, held in self._by_adapter.items())
        return dict(sorted(firsts, key=lambda item: item[1].arrival))

    def candidates(
        self, orders: Iterable[Order], count: int, arrival_cutoff: float
    ) -> Iterable[Sequence]:
        """Return the union of the first `count` ready sequences in each of these orders.

        arrival_cutoff: sequences that arrived later are left out.
        """
        found: dict[Sequence, None] = {}
        resident: dict[AdapterHandle, bool] = {}
        for order in orders:
            first = self._orders[order].first_ready(count, arrival_cutoff, resident)
            found.update(dict.fromkeys(first))
        return found

    def _add_to_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            held = self._by_adapter.setdefault(sequence.adapter, _SortedSequences(_arrival))
            held.add(sequence)

    def _remove_from_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            held = self._by_adapter[sequence.adapter]
            held.remove(sequence)
            if not held.items:
                del self._by_adapter[sequence.adapter]

    def _orders_of(self, sequence: Sequence) -> list[_SortedSequences]:
        """Return the sorted lists that contain this sequence."""
        has_deadline = sequence.deadline < math.inf
        orders = self._orders.items()
        return [held for order, held in orders if has_deadline or order is not Order.DEADLINE]


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival

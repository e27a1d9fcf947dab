"""What the operator goes through, by slot: the adapters that a step can use.

A slot is an index in every group of projections and in the heads; an evicted adapter's is given to
the next. Knows nothing of names, files or who waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import LoraPair
from vlora.ids import MatrixId
from vlora.lora.adapter import Adapter, ModelShape
from vlora.lora.weights_reader import cast


class Slots:
    """Owns the groups; a slot's adapter is whole: taken, packed into all of them, then used."""

    def __init__(self, model: ModelShape, dtype: torch.dtype) -> None:
        """dtype: in which the operator gets the pairs."""
        self._model = model
        self._dtype = dtype
        self._groups: dict[tuple[MatrixId, ...], LoraGroup] = {}
        self.heads = HeadGroup(model.hidden)
        self._adapters: list[Adapter | None] = []
        self._given_up: set[int] = set()

    def group(self, places: Sequence[MatrixId]) -> LoraGroup:
        """Pairs of matrices that share their input, by slot, now and later."""
        key = tuple(places)
        if key not in self._groups:
            shapes = [self._model.shape_of(place) for place in key]
            group = LoraGroup(shapes[0][1], [d_out for d_out, _ in shapes], self._dtype)
            for adapter in self._adapters:
                pairs = {} if adapter is None else self._pairs(adapter)
                group.append([pairs.get(place) for place in key])
            self._groups[key] = group
        return self._groups[key]

    def _pairs(self, adapter: Adapter) -> Mapping[MatrixId, LoraPair]:
        """In the operator's type."""
        if self._dtype == torch.float32:
            return adapter.pairs
        return cast(adapter.pairs, self._dtype)

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Of an adapter's packed copies in all groups. Its head is the core's own beside them."""
        return sum(
            group.slot_bytes([ranks.get(place, 0) for place in places])
            for places, group in self._groups.items()
        )

    def take(self, adapter: Adapter) -> int:
        """A slot for it, not to be used until `pack`."""
        if self._given_up:
            slot = self._given_up.pop()
        elif None in self._adapters:
            slot = self._adapters.index(None)
        else:
            slot = len(self._adapters)
            for group in self._groups.values():
                group.append([None] * len(group.d_outs))
            self.heads.append(None)
            self._adapters.append(None)
        self._adapters[slot] = adapter
        return slot

    def pack(self, slot: int, address: int | None = None, room: int = 0) -> None:
        """The slot's adapter into all groups: into `room` bytes at `address`, one group after the
        other in the order of use, or without one into memory of the core's own. On any thread,
        while nothing uses the slot yet."""
        adapter = self._adapters[slot]
        assert adapter is not None, f"slot {slot} is nobody's"
        pairs = self._pairs(adapter)
        for places, group in list(self._groups.items()):
            row = [pairs.get(place) for place in places]
            if address is None:
                group.put(slot, row)
                continue
            size = group.slot_bytes([0 if pair is None else pair.rank for pair in row])
            group.put(slot, row, (address, room))
            address, room = address + size, room - size
        self.heads.put(slot, adapter.head.linear if adapter.head else None)

    def clear(self, slot: int) -> None:
        """Nothing goes through the slot any more; the next may take it."""
        for group in self._groups.values():
            group.clear(slot)
        self.heads.put(slot, None)
        self._adapters[slot] = None

    def give_up(self, slot: int) -> None:
        """Nothing uses the slot any more; it is cleared by `sweep`, unless the next takes it."""
        self._adapters[slot] = None
        self._given_up.add(slot)

    def sweep(self) -> None:
        """Clears what was given up."""
        while self._given_up:
            self.clear(self._given_up.pop())

    def adapter(self, slot: int) -> Adapter:
        found = self._adapters[slot]
        if found is None:
            raise KeyError(f"slot {slot} is empty")
        return found

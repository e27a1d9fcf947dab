"""Slots of the operator: the adapters that steps can use.

A slot is an index into every group of projections and into the heads; the slot of an evicted
adapter is reused. This module knows no names, files or waiting requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.ids import MatrixId
from vlora.lora.adapter import Adapter
from vlora.lora.model_shape import ModelShape


class Slots:
    """Owner of the groups. An adapter is assigned to a slot, then packed into all groups, then
    used."""

    def __init__(self, model: ModelShape, dtype: torch.dtype) -> None:
        """Create the slots. dtype: of the packed copies; the groups keep the host copies."""
        self._model = model
        self._dtype = dtype
        self._groups: dict[tuple[MatrixId, ...], LoraGroup] = {}
        self.heads = HeadGroup(model.hidden)
        self._adapters: list[Adapter | None] = []
        self._released: set[int] = set()

    def group(self, matrices: Sequence[MatrixId]) -> LoraGroup:
        """Return the present and future pairs of matrices that share their input, by slot."""
        key = tuple(matrices)
        if key not in self._groups:
            shapes = [self._model.shape_of(matrix) for matrix in key]
            group = LoraGroup(shapes[0][1], [d_out for d_out, _ in shapes], self._dtype)
            for adapter in self._adapters:
                pairs = {} if adapter is None else adapter.pairs
                group.append([pairs.get(matrix) for matrix in key])
            self._groups[key] = group
        return self._groups[key]

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Return the size of an adapter's packed copies in all groups. The compiled core
        allocates the head's copy itself."""
        return sum(
            group.slot_bytes([ranks.get(matrix, 0) for matrix in matrices])
            for matrices, group in self._groups.items()
        )

    def take(self, adapter: Adapter) -> int:
        """Return a slot for the adapter; it must not be used before `pack`."""
        if self._released:
            slot = self._released.pop()
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

    def pack(self, slot: int, address: int | None = None, size: int = 0) -> None:
        """Pack the slot's adapter into all groups.

        May run on any thread, while nothing uses the slot.

        address: where the copies are written, one group after the other in the order of use; None
            lets the compiled core allocate memory.
        size: number of bytes at `address`.
        """
        adapter = self._adapters[slot]
        assert adapter is not None, f"slot {slot} is empty"
        for matrices, group in list(self._groups.items()):
            row = [adapter.pairs.get(matrix) for matrix in matrices]
            if address is None:
                group.put(slot, row)
                continue
            used = group.slot_bytes([0 if pair is None else pair.rank for pair in row])
            group.put(slot, row, (address, size))
            address, size = address + used, size - used
        self.heads.put(slot, adapter.head.linear if adapter.head else None)

    def clear(self, slot: int) -> None:
        """Empty the slot, which can then be assigned again."""
        for group in self._groups.values():
            group.clear(slot)
        self.heads.put(slot, None)
        self._adapters[slot] = None

    def release(self, slot: int) -> None:
        """Release a slot that nothing uses any more; it keeps its pairs until `sweep` or its
        reuse."""
        self._adapters[slot] = None
        self._released.add(slot)

    def sweep(self) -> None:
        """Clear all released slots."""
        while self._released:
            self.clear(self._released.pop())

    def adapter(self, slot: int) -> Adapter:
        adapter = self._adapters[slot]
        if adapter is None:
            raise KeyError(f"slot {slot} is empty")
        return adapter

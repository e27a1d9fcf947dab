"""Slots of the LoRA operator.

A slot is an index into every group of projections and into the vision task heads. The slot of an
evicted adapter is reused. This module handles no names, files or waiting requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vlora.atmm.cuda.tables import padded
from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import HeadMatrix, LoraPair
from vlora.ids import MatrixId
from vlora.lora.adapter import Adapter
from vlora.lora.model_shape import ModelShape
from vlora.memory.device import HOST, Device


class Slots:
    """Owner of the groups of projections and of the heads.

    An adapter first gets a slot from `take`. `pack` then writes its weights, after which steps may
    use the slot.
    """

    def __init__(self, model: ModelShape, dtype: torch.dtype, device: Device = HOST) -> None:
        """Create the slots.

        dtype: dtype of the packed copies; host copies are fp32.
        device: device whose steps use the adapters.
        """
        self._model = model
        self._dtype = dtype
        self._device = device
        self._groups: dict[tuple[MatrixId, ...], LoraGroup] = {}
        self.heads = HeadGroup(model.hidden, device.torch_device.type)
        self._adapters: list[Adapter | None] = []
        self._released: set[int] = set()

    def group(self, matrices: Sequence[MatrixId]) -> LoraGroup:
        """Return the group of these matrices, which share their input.

        The group holds A and B of each matrix by slot.
        """
        key = tuple(matrices)
        if key not in self._groups:
            shapes = [self._model.shape_of(matrix) for matrix in key]
            d_outs = [d_out for d_out, _ in shapes]
            device_type = self._device.torch_device.type
            group = LoraGroup(shapes[0][1], d_outs, self._dtype, device_type)
            for adapter in self._adapters:
                pairs = {} if adapter is None else adapter.pairs
                group.append([pairs.get(matrix) for matrix in key])
            self._groups[key] = group
        return self._groups[key]

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Return the size in bytes of an adapter's packed copies in all groups.

        The copy of its vision task head is not counted, since the compiled core allocates it
        outside the pool.

        ranks: rank of each matrix that the adapter changes.
        """
        return sum(
            group.slot_bytes([ranks.get(matrix, 0) for matrix in matrices])
            for matrices, group in self._groups.items()
        )

    def take(self, adapter: Adapter) -> int:
        """Assign a slot to the adapter, and return the slot. Steps may use it only after `pack`."""
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
        """Pack the slot's adapter into all groups, one after another in the order in which steps
        use them.

        Any thread may call this, because no step uses the slot yet. If the CPU cannot write to the
        device's memory, the call only starts the copies, and a step waits for those that it uses.

        address: address of the memory to write to. If None, the compiled core allocates memory.
        size: number of bytes at `address`.
        """
        adapter = self._adapters[slot]
        assert adapter is not None, f"slot {slot} is empty"
        for matrices, group in list(self._groups.items()):
            row = [adapter.pairs.get(matrix) for matrix in matrices]
            if address is None:
                self._put(group, slot, row)
                continue
            used = group.slot_bytes([0 if pair is None else pair.rank for pair in row])
            group.put(slot, row, (address, size))
            address, size = address + used, size - used
        head = adapter.head.linear if adapter.head else None
        if head is None or self._device.in_host_memory:
            self.heads.put(slot, head)
        else:
            load = self._device.load(head)
            self.heads.put(slot, HeadMatrix(*load.tensors), load.wait)

    def _put(self, group: LoraGroup, slot: int, row: Sequence[LoraPair | None]) -> None:
        """Set the pairs of a slot, and begin to copy them if they are not on the device yet."""
        device, pairs = self._device, [pair for pair in row if pair is not None]
        if device.in_host_memory or not pairs or pairs[0].a.device == device.torch_device:
            group.put(slot, row)
            return
        rounded = [padded(LoraPair(*(f.to(group.dtype) for f in pair))) for pair in pairs]
        load = device.load([factor for pair in rounded for factor in pair])
        copies = iter(load.tensors)
        placed = [pair and LoraPair(next(copies), next(copies)) for pair in row]
        group.put(slot, placed, wait=load.wait)

    def clear(self, slot: int) -> None:
        """Free the memory of a slot at once. The slot can be assigned again."""
        for group in self._groups.values():
            group.clear(slot)
        self.heads.put(slot, None)
        self._adapters[slot] = None

    def release(self, slot: int) -> None:
        """Release a slot that nothing uses any more. The slot can be assigned again.

        Unlike with `clear`, the slot's weights stay in memory. `sweep` frees them, or `pack`
        replaces them by those of another adapter.
        """
        self._adapters[slot] = None
        self._released.add(slot)

    def sweep(self) -> None:
        """Free the memory of all released slots."""
        while self._released:
            self.clear(self._released.pop())

    def adapter(self, slot: int) -> Adapter:
        adapter = self._adapters[slot]
        if adapter is None:
            raise KeyError(f"slot {slot} is empty")
        return adapter

"""Switcher: owner of the active weights (§4.4.1 of the paper), which all layers read.

Other code decides when to switch, and derives the signs of a step's segments from `live`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from vlora.adapters.files import Adapter
from vlora.atmm import op
from vlora.atmm.types import CopiedPart, LoraPair, Merges, MergeUpdate
from vlora.device.host_memory import PAGE
from vlora.errors import OutOfMemory
from vlora.ids import BASE, MatrixId
from vlora.kernels.quantized import QuantizedWeight
from vlora.weights.quantized_slab import QuantizedSlab
from vlora.weights.slab import GROUPS, WeightSlab

log = logging.getLogger(__name__)

MIB = 1 << 20

# Maximum number of adapters whose A and B are copied to a GPU for merging: the one that is merged,
# and the next.
MAX_PREPARED = 2


class MergeSource(Protocol):
    """Source of the adapters to merge. `matrices`: all that any known adapter changes."""

    @property
    def matrices(self) -> Collection[MatrixId]: ...

    def adapter(self, slot: int) -> Adapter: ...


@dataclass(frozen=True)
class Active:
    """Weights that a forward pass reads.

    live: slot of the merged adapter, or BASE.
    views: matrix of each layer and group, in the order of `WeightSlab.regions`. A matrix that the
        adapter does not change is a view of the base slab.
    merged_groups: indices in `views` of the views of the merged slab.
    """

    live: int
    views: tuple[torch.Tensor | QuantizedWeight, ...]
    merged_groups: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Prepared:
    """Prepared merge of an adapter: the products to compute, and the weights active afterwards."""

    adapter: weakref.ref[Adapter]  # Weak, so that an evicted adapter is not kept in memory.
    merges: Merges
    active: Active


class Switcher:
    """Owner of the active weights, which `switch` changes. At first, the base model is active.

    With `merging` = "out_of_place", one call of the ATMM operator writes base + B·A of all layers
    to a second slab. Switching back to the base, or to the adapter in the second slab, is one
    assignment. With "in_place", the method of the paper, each merge changes the base weights and
    must be undone. Both operations round, so the base weights drift. "off" refuses all adapters.

    stored: slab of the base weights. Nothing is ever merged into quantized ones.
    memory: maximum size of merged weights in bytes; None for no limit.
    """

    def __init__(
        self,
        slab: WeightSlab | QuantizedSlab,
        adapters: MergeSource,
        merging: str = "out_of_place",
        memory: int | None = None,
    ) -> None:
        self.memory = memory
        self.stored = slab
        self._adapters = adapters
        self._merging = merging
        self._base = Active(BASE, tuple(slab.views))
        self.active = self._base
        self._merged: torch.Tensor | None = None
        self._in_slab: _Prepared | None = None
        self._prepared: dict[int, _Prepared] = {}
        # Number of matrices that adapters change, and the bytes that they need when merged.
        self._size_of_matrices = (0, 0)
        if merging != "in_place":
            slab.seal()

    def reserve(self) -> None:
        """Allocate the memory of merged weights now, if merging is out of place. If the device has
        too little, log a warning, and refuse to merge any adapter.
        """
        if self._merging != "out_of_place":
            return
        try:
            self._second_slab()
        except OutOfMemory as error:
            log.warning("no adapter is merged: %s", error)
            self.memory = 0

    @property
    def live(self) -> int:
        return self.active.live

    @property
    def merged(self) -> int:
        """Slot whose merged weights exist in memory, active or not; BASE if there are none. If
        merging is out of place, a switch to this slot needs no merge.
        """
        return BASE if self._in_slab is None else self._in_slab.active.live

    @property
    def merged_bytes(self) -> int:
        """Bytes that merged weights take besides the base weights: groups that a known adapter
        changes, in whole huge pages, or the whole slab if the device does not commit memory lazily.
        """
        if self._merging != "out_of_place" or isinstance(self.stored, QuantizedSlab):
            return 0
        matrices = self._adapters.matrices
        # The set only grows, so its length shows a change. Each step reads this property.
        if len(matrices) != self._size_of_matrices[0]:
            self._size_of_matrices = (len(matrices), self._bytes_of(matrices))
        return self._size_of_matrices[1]

    @property
    def _slab(self) -> WeightSlab:
        assert isinstance(self.stored, WeightSlab)
        return self.stored

    def _second_slab(self) -> torch.Tensor:
        if self._merged is None:
            self._merged = self._slab.reserve()
        return self._merged

    def _bytes_of(self, matrices: Collection[MatrixId]) -> int:
        if not self._slab.device.commits_lazily:
            return self._slab.base.nbytes if matrices else 0
        size = self._slab.dtype.itemsize
        pages: set[int] = set()
        for index in _groups(matrices):
            region = self._slab.regions[index]
            first, count = region.offset * size, region.rows * region.columns * size
            pages.update(range(first // PAGE, (first + count - 1) // PAGE + 1))
        return min(len(pages) * PAGE, self._slab.base.nbytes)

    def refusal(self, slot: int) -> str | None:
        """Return why `switch` to a slot would be refused; None if it would not."""
        if slot == BASE:
            return None
        reason = self.refusal_of_all()
        if reason is None and self._adapters.adapter(slot).info.invocation:
            reason = "an activated LoRA does not act on all tokens"
        return reason

    def refusal_of_all(self) -> str | None:
        """Return why no adapter can be merged at all; None if some can."""
        if self._merging == "off":
            return "merging is off"
        if isinstance(self.stored, QuantizedSlab):
            return f"the base weights are quantized to {self.stored.format.name}"
        needed = self.merged_bytes
        if self.memory is not None and needed > self.memory:
            base = f"the base model's {self._slab.base.nbytes / MIB:.1f} MiB"
            need = f"merged weights need {needed / MIB:.1f} MiB in addition to {base}"
            return f"{need}; {self.memory / MIB:.1f} MiB are left for them"
        return None

    def can_merge(self, slot: int) -> bool:
        return self.refusal(slot) is None

    def switch(self, slot: int) -> None:
        """Activate weights in which the adapter in `slot` is merged, or the base weights for BASE.

        If the merge operator fails, the base weights are active afterwards if merging is out of
        place, else none. Raises ValueError if `refusal` gives a reason.
        """
        if self._merging == "in_place":
            self._switch_in_place(slot)
        else:
            self.active = self._base if slot == BASE else self._merge(self._ready(slot))

    def _merge(self, prepared: _Prepared) -> Active:
        if self._in_slab is not prepared:
            merged = self._second_slab()
            self.active, self._in_slab = self._base, None
            op.merge(merged, self._slab.base, prepared.merges)
            self._in_slab = prepared
        return prepared.active

    def _switch_in_place(self, slot: int) -> None:
        prepared = None if slot == BASE else self._ready(slot)
        if prepared is self._in_slab:
            return
        base, previous = self._slab.base, self._in_slab
        self.active = Active(self.live, ())  # The weights are invalid during the change.
        if previous is not None:
            op.merge(base, base, previous.merges, -1)
        if prepared is not None:
            op.merge(base, base, prepared.merges)
        self._in_slab = prepared
        self.active = self._base if prepared is None else prepared.active

    def _ready(self, slot: int) -> _Prepared:
        if (reason := self.refusal(slot)) is not None:
            raise ValueError(f"slot {slot} cannot be merged: {reason}")
        adapter = self._adapters.adapter(slot)
        prepared = self._prepared.get(slot)
        if prepared is None or prepared.adapter() is not adapter:
            if not self._slab.device.in_host_memory:
                # A prepared merge holds copies of A and B in the device's memory.
                self._prepared = {
                    kept: known for kept, known in self._prepared.items() if known is self._in_slab
                }
            prepared = self._prepared[slot] = self._prepare(slot, adapter)
        return prepared

    def forget(self, slot: int) -> None:
        """Delete the prepared merge of a slot that will be reused for another adapter. Raises
        ValueError if the slot is live.
        """
        if self.live == slot:
            raise ValueError(f"slot {slot} is live")
        prepared = self._prepared.pop(slot, None)
        if prepared is not None and prepared is self._in_slab:
            self._in_slab = None

    def _forget(self, slot: int, gone: weakref.ref[Adapter]) -> None:
        # The adapter no longer exists, so the copies of its A and B are not needed either.
        prepared = self._prepared.get(slot)
        if prepared is not None and prepared.adapter is gone:
            del self._prepared[slot]
            if self._in_slab is prepared and self.live == BASE:
                self._in_slab = None

    def _prepare(self, slot: int, adapter: Adapter) -> _Prepared:
        slab, updates, copied = self._slab, [], []
        views, merged_groups = list(self._base.views), set()
        for index in _groups(adapter.pairs):
            layer, group = divmod(index, len(GROUPS))
            for target in GROUPS[group]:
                region = slab.region(layer, target)
                if pair := adapter.pairs.get((layer, target)):
                    on_device = (factor.to(slab.device.torch_device) for factor in pair)
                    factors = LoraPair(*(factor.float().contiguous() for factor in on_device))
                    updates.append(MergeUpdate(region.offset, factors))
                elif self._merging == "out_of_place":
                    # The fused view of the merged slab also contains this matrix.
                    copied.append(CopiedPart(region.offset, region.rows * region.columns))
            if self._merging == "out_of_place":
                views[index] = slab.regions[index].view(self._second_slab())
                merged_groups.add(index)
        reference = weakref.ref(adapter, partial(self._forget, slot))
        active = Active(slot, tuple(views), frozenset(merged_groups))
        return _Prepared(reference, Merges(updates, copied), active)


def _groups(matrices: Iterable[MatrixId]) -> list[int]:
    # Returns the indices, in order, of the slab's regions that contain any of these matrices.
    indices = {
        layer * len(GROUPS) + number
        for layer, target in matrices
        for number, group in enumerate(GROUPS)
        if target in group and layer >= 0
    }
    return sorted(indices)

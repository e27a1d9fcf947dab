"""Which weights are active: the base model's, or those with one adapter in them (§4.4.1).

One object owns that state, the merged slab and the merge; layers read its views, the signs of a
step's segments follow from its `live`, and nothing else has a say. Knows nothing of when to switch.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from vlora.atmm import op
from vlora.atmm.types import CopiedPart, LoraPair, Merges, MergeUpdate
from vlora.ids import BASE, MatrixId
from vlora.lora.adapter import Adapter
from vlora.lora.slab import GROUPS, WeightSlab
from vlora.memory.hugepages import PAGE

MIB = 1 << 20


class Adapters(Protocol):
    """What is merged. places: the matrices that any known adapter changes."""

    @property
    def places(self) -> Collection[MatrixId]: ...

    def adapter(self, slot: int) -> Adapter: ...


@dataclass(frozen=True)
class Active:
    """live: slot of the adapter in the weights, or BASE. views: the matrix of each layer and group,
    in the order of `WeightSlab.regions`: the base's own where the adapter changes nothing."""

    live: int
    views: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Prepared:
    """An adapter's merge: its work list, and what is active once it is done. It does not keep the
    adapter alive: who evicts one need not know of this."""

    adapter: weakref.ref[Adapter]
    merges: Merges
    active: Active


class Switcher:
    """The active weights, changed by `switch` and read by every layer.

    Out of place, M = base + B·A of all layers goes to a second slab in one ATMM call, and the base
    stays as it was: going back to it is one assignment, as is returning to the adapter that the
    merged slab still holds. In place (the paper's way) needs no second slab; the base is changed
    and changed back, and drifts by the rounding of either.
    """

    def __init__(
        self,
        slab: WeightSlab,
        adapters: Adapters,
        merging: str = "out_of_place",
        memory: int | None = None,
    ) -> None:
        """merging: "out_of_place", "in_place" or "off". memory: see there."""
        self.memory = memory
        """Bytes that merged weights may take; None: any number."""
        self._slab = slab
        self._adapters = adapters
        self._merging = merging
        self._base = Active(BASE, tuple(region.view(slab.base) for region in slab.regions))
        self.active = self._base
        self._merged: torch.Tensor | None = None
        self._holds: _Prepared | None = None
        self._prepared: dict[int, _Prepared] = {}
        self._counted = (0, 0)
        """Places of all known adapters, and the memory that they need."""
        if merging != "in_place":
            slab.seal()

    @property
    def live(self) -> int:
        """Slot of the adapter in the active weights, or BASE."""
        return self.active.live

    @property
    def merged(self) -> int:
        """Slot whose weights are merged, live or not, or BASE: `switch` to it merges nothing."""
        return BASE if self._holds is None else self._holds.active.live

    @property
    def merged_bytes(self) -> int:
        """Memory of merged weights: whole pages of each group that a known adapter changes."""
        if self._merging != "out_of_place":
            return 0
        places = self._adapters.places
        if len(places) != self._counted[0]:  # they grow, and this is asked in every step
            self._counted = (len(places), self._bytes_of(places))
        return self._counted[1]

    def _bytes_of(self, places: Collection[MatrixId]) -> int:
        size = self._slab.dtype.itemsize
        pages: set[int] = set()
        for index in _groups(places):
            region = self._slab.regions[index]
            first, count = region.offset * size, region.rows * region.columns * size
            pages.update(range(first // PAGE, (first + count - 1) // PAGE + 1))
        return min(len(pages) * PAGE, self._slab.base.nbytes)

    def refusal(self, slot: int) -> str | None:
        """Why `switch` to a slot is refused; None if it is not."""
        if slot == BASE:
            return None
        if self._merging == "off":
            return "merging is off"
        needed = self.merged_bytes
        if self.memory is not None and needed > self.memory:
            base = self._slab.base.nbytes
            return (
                f"merged weights need {needed / MIB:.1f} MiB beside the base model's"
                f" {base / MIB:.1f}; {self.memory / MIB:.1f} MiB are left for them"
            )
        return None

    def can_merge(self, slot: int) -> bool:
        return self.refusal(slot) is None

    def switch(self, slot: int) -> None:
        """Make `slot` the live one; BASE: the base model. Raises ValueError where it is refused.

        A fault on the way leaves the base model's weights active; in place, none at all.
        """
        if self._merging == "in_place":
            self._switch_in_place(slot)
        elif slot == BASE:
            self.active = self._base
        else:
            self.active = self._merge(self._ready(slot))

    def _merge(self, wanted: _Prepared) -> Active:
        if self._holds is not wanted:
            if self._merged is None:
                self._merged = self._slab.reserve()
            self.active, self._holds = self._base, None
            op.merge(self._merged, self._slab.base, wanted.merges)
            self._holds = wanted
        return wanted.active

    def _switch_in_place(self, slot: int) -> None:
        wanted = None if slot == BASE else self._ready(slot)
        if wanted is self._holds:
            return
        base, last = self._slab.base, self._holds
        self.active = Active(self.live, ())  # half done, it is nobody's weights
        if last is not None:
            op.merge(base, base, last.merges, -1)
        if wanted is not None:
            op.merge(base, base, wanted.merges)
        self._holds = wanted
        self.active = self._base if wanted is None else wanted.active

    def _ready(self, slot: int) -> _Prepared:
        """The adapter's work list, made when it is first merged."""
        if (reason := self.refusal(slot)) is not None:
            raise ValueError(f"slot {slot} cannot be merged: {reason}")
        adapter = self._adapters.adapter(slot)
        known = self._prepared.get(slot)
        if known is None or known.adapter() is not adapter:
            known = self._prepared[slot] = self._prepare(slot, adapter)
        return known

    def forget(self, slot: int) -> None:
        """The slot will be another adapter's; it must not be live."""
        if self.live == slot:
            raise ValueError(f"slot {slot} is live")
        known = self._prepared.pop(slot, None)
        if known is not None and known is self._holds:
            self._holds = None

    def _forget(self, slot: int, gone: weakref.ref[Adapter]) -> None:
        """The adapter exists no more; nor do its factors, once this lets them go."""
        known = self._prepared.get(slot)
        if known is not None and known.adapter is gone:
            del self._prepared[slot]
            if self._holds is known and self.live == BASE:
                self._holds = None

    def _prepare(self, slot: int, adapter: Adapter) -> _Prepared:
        slab, updates, copied = self._slab, [], []
        views = list(self._base.views)
        for index in _groups(adapter.pairs):
            layer, group = divmod(index, len(GROUPS))
            for target in GROUPS[group]:
                place = slab.place(layer, target)
                if pair := adapter.pairs.get((layer, target)):
                    whole = LoraPair(*(factor.float().contiguous() for factor in pair))
                    updates.append(MergeUpdate(place.offset, whole))
                elif self._merging == "out_of_place":
                    # The fused view needs it beside the others.
                    copied.append(CopiedPart(place.offset, place.rows * place.columns))
            if self._merging == "out_of_place":
                if self._merged is None:
                    self._merged = slab.reserve()
                views[index] = slab.regions[index].view(self._merged)
        known = weakref.ref(adapter, partial(self._forget, slot))
        return _Prepared(known, Merges(updates, copied), Active(slot, tuple(views)))


def _groups(places: Iterable[MatrixId]) -> list[int]:
    """Indices, in order, of the layers' groups that hold any of these matrices."""
    found = {
        layer * len(GROUPS) + number
        for layer, target in places
        for number, group in enumerate(GROUPS)
        if target in group and layer >= 0
    }
    return sorted(found)

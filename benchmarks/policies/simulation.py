"""Parts of simulated replays: copies of cost models, and adapters without files."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

from vlora.adapters.files import AdapterDescription, AdapterInfo
from vlora.adapters.handle import AdapterHandle, AdapterState
from vlora.engine.cost import CostModel
from vlora.ids import BASE


def fork(costs: CostModel) -> CostModel:
    """Return a copy of a cost model; from now on the two learn separately."""
    return replace(costs, corrections=copy.deepcopy(costs.corrections))


def without_adapters(costs: CostModel) -> CostModel:
    """Return a copy of a cost model in which adapters cost nothing."""
    profile = replace(
        costs.profile,
        lora_calls=0.0,
        adapter_element=0.0,
        adapter_element_row=0.0,
        merge=(0.0, 0.0),
    )
    return replace(costs, profile=profile)


def resident_adapter(slot: int) -> AdapterHandle | None:
    """Return an adapter without files that is resident in this slot, or None for the base."""
    if slot == BASE:
        return None
    info = AdapterInfo(f"slot {slot}", f"digest {slot}", (), (), (), {}, (), ())
    described = AdapterDescription(info, {}, 0)
    return AdapterHandle(info.name, Path(), b"", described, AdapterState.RESIDENT, slot=slot)

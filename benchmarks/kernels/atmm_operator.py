"""ATMM among the compared operators: with its tile table, and with one static tile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

import vlora.atmm as atmm_package
from benchmarks.kernels.cells import KernelCell
from benchmarks.kernels.operators import LoraCall, LoraOperator
from benchmarks.machine import is_compiled
from vlora import native
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segments


class Atmm(LoraOperator):
    """ATMM, the operator under test.

    config: index of the tile configuration for all shapes; None to choose it from the table.
    """

    name: ClassVar[str] = "atmm"

    def __init__(self, config: int | None = None) -> None:
        self._config = config

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        group = LoraGroup.of(cell.width, pairs)
        segments, config = Segments(cell.segments), self._config

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            op.apply(y, x, segments, group, config=config)

        return call


class StaticTile(Atmm):
    """ATMM with one tile configuration for every shape."""

    prefix: ClassVar[str] = "static:"

    def __init__(self, config: int, name: str) -> None:
        super().__init__(config)
        self.name = self.prefix + name  # type: ignore[misc]


def static_tiles(dtype: str) -> list[LoraOperator]:
    """Return the candidates for the best single static tile.

    They are the built-in choices, and the tiles that the tables name most often: two that compute
    the whole depth at a time, and two with a depth block. A tile outside this list can be better.
    The speed-up over these candidates is therefore an upper bound of the gain of adaptive choice.
    """
    if not is_compiled():
        return []
    from vlora.atmm import tiles

    configs = tiles.configs("apply", dtype)
    index = {config["name"]: i for i, config in enumerate(configs)}
    counts = _table_counts(dtype)
    names = sorted(counts.keys() & index.keys(), key=lambda name: -counts[name])
    streaming = [name for name in names if not configs[index[name]]["depth_block"]]
    blocking = [name for name in names if configs[index[name]]["depth_block"]]
    built_in = (
        tiles.built_in("apply", dtype, rows=rows, d_in=1024, d_out=1024, rank=64, segments=1)
        for rows in (1, 64)
    )
    chosen = dict.fromkeys((*streaming[:2], *blocking[:2], *built_in))
    return [StaticTile(index[name], name) for name in chosen if name in index]


def _table_counts(dtype: str) -> dict[str, int]:
    """Return how often each tile configuration occurs in the tables of the instruction set."""
    counts: dict[str, int] = {}
    for path in (Path(atmm_package.__file__).parent / "tables").glob("*.json"):
        table = json.loads(path.read_text())
        if (table["isa"], table["dtype"]) == (native.kernels().runtime.isa(dtype), dtype):
            for name, count in table["configs"].items():
                counts[name] = counts.get(name, 0) + count
    return counts

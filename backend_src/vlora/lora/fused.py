"""Adapters of fused linear layers, each of which corresponds to several matrices of the served
model.

The query, key and value projections of Qwen are one layer, `c_attn`. The layer's A belongs to each
of the three matrices. Its B has the rows for `q_proj`, then those for `k_proj` and `v_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from vlora.atmm.types import LoraPair
from vlora.ids import MatrixId

FUSED = {"c_attn": ("q_proj", "k_proj", "v_proj")}
"""Targets of each fused layer, in the order of the layer's rows. All targets of a layer have the
same size.
"""

T = TypeVar("T")


def for_each_matrix(values: Mapping[MatrixId, T]) -> dict[MatrixId, T]:
    """Return the values by matrix, with the value of each fused layer assigned to all of its
    matrices.
    """
    given = {
        (layer, target): value
        for (layer, name), value in values.items()
        for target in FUSED.get(name, (name,))
    }
    return {matrix: given[matrix] for matrix in sorted(given)}


def split_pairs(pairs: Mapping[MatrixId, LoraPair]) -> dict[MatrixId, LoraPair]:
    """Return A and B by matrix, with B of each fused layer split into the rows of its matrices."""
    split: dict[MatrixId, LoraPair] = {}
    for (layer, name), pair in pairs.items():
        targets = FUSED.get(name, (name,))
        for target, b in zip(targets, pair.b.chunk(len(targets)), strict=True):
            split[layer, target] = LoraPair(pair.a, b)
    return {matrix: split[matrix] for matrix in sorted(split)}

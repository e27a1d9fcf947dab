"""The pages' bytes: keys and values of every layer, in the order in which attention reads them.

Knows pages and places in them, nothing of sequences.
"""

from __future__ import annotations

import torch

from vlora.memory import huge

LANES = 16
"""Tokens of a panel: the scores of its keys fill a vector of any instruction set."""


class KVStore:
    """[pages, layers, 2, kv_heads, panels, LANES · padded dim] fp32 or bf16, a page contiguous.

    A page's tokens lie in panels of LANES; the last one is filled in part where the block is no
    multiple of it. Keys of a panel are [dim, LANES], its values [LANES, dim], the dim padded to a
    multiple of LANES with zeros. `cache[:, layer, 0]` are keys, `[:, layer, 1]` values.
    """

    def __init__(
        self,
        pages: int,
        layers: int,
        block: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block = block
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self._padded = -(-head_dim // LANES) * LANES
        panels = -(-block // LANES)
        self.cache = huge.zeros(
            pages, layers, 2, kv_heads, panels, LANES * self._padded, dtype=dtype
        )

    def keys(self, layer: int) -> torch.Tensor:
        """View [pages, kv_heads, panels, dim, LANES] of one layer."""
        found = self.cache[:, layer, 0]
        return found.view(*found.shape[:3], self._padded, LANES)[..., : self.head_dim, :]

    def values(self, layer: int) -> torch.Tensor:
        """View [pages, kv_heads, panels, LANES, dim] of one layer."""
        found = self.cache[:, layer, 1]
        return found.view(*found.shape[:3], LANES, self._padded)[..., : self.head_dim]

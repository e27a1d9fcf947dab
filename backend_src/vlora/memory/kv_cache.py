"""The pages' bytes: keys and values of every layer, in the order in which attention reads them.

An adapter's run of pages is plain memory here. Knows pages and places in them, nothing of sequences
or adapters.
"""

from __future__ import annotations

import math

import torch

from vlora.memory import hugepages
from vlora.memory.pool import Moves

LANES = 16
"""Tokens of a panel: the scores of its keys fill a vector of any instruction set."""


class KVStore:
    """[pages, layers, 2, kv_heads, panels, LANES · padded dim] fp32 or bf16, a page contiguous.

    A page's tokens lie in panels of LANES; the last one is filled in part where the block is no
    multiple of it. Keys of a panel are [dim, LANES], its values [LANES, dim], in bf16 by pairs
    [dim / 2, LANES, 2] and [LANES / 2, dim, 2], the dim padded to a multiple of LANES with zeros.
    `cache[:, layer, 0]` are keys, `[:, layer, 1]` values.
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
        shape = page_shape(layers, block, kv_heads, head_dim)
        self._padded = shape[-1] // LANES
        self.cache = hugepages.hugepage_zeros(pages, *shape, dtype=dtype)

    @property
    def page_bytes(self) -> int:
        return self.cache.stride(0) * self.cache.itemsize

    def address(self, page: int) -> int:
        """Of the page's first byte, a multiple of 64."""
        return self.cache.data_ptr() + page * self.page_bytes

    def move(self, moves: Moves) -> None:
        """Copies whole pages; none that is read is written."""
        if moves:
            self.cache[list(moves.values())] = self.cache[list(moves)]

    def clear(self, pages: range) -> None:
        """Zeros, as padding has to be, where an adapter lay: neighbouring pages."""
        self.cache[pages.start : pages.stop].zero_()

    def keys(self, layer: int) -> torch.Tensor:
        """View [pages, kv_heads, panels, dim / 2, 2, LANES] of one layer."""
        found = self._pairs(self.cache[:, layer, 0], self._padded, LANES)
        return found[..., : self.head_dim // 2, :, :]

    def values(self, layer: int) -> torch.Tensor:
        """View [pages, kv_heads, panels, LANES / 2, 2, dim] of one layer."""
        return self._pairs(self.cache[:, layer, 1], LANES, self._padded)[..., : self.head_dim]

    def _pairs(self, panels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[…, rows · columns] as they lie in memory → view […, rows / 2, 2, columns]."""
        before = panels.shape[:-1]
        if self.cache.dtype == torch.bfloat16:
            return panels.view(*before, rows // 2, columns, 2).transpose(-2, -1)
        return panels.view(*before, rows // 2, 2, columns)


def page_shape(
    layers: int, block: int, kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """A page's elements: [layers, 2, kv_heads, panels, LANES · padded dim]."""
    padded = -(-head_dim // LANES) * LANES
    return layers, 2, kv_heads, -(-block // LANES), LANES * padded


def page_bytes(layers: int, block: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return math.prod(page_shape(layers, block, kv_heads, head_dim)) * dtype.itemsize

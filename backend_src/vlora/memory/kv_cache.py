"""KV cache: the bytes of all pages, with keys and values in the order in which attention reads
them.

An adapter's run of pages is plain memory here. This module knows pages, layers and heads, but no
sequences or adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vlora.memory import hugepages
from vlora.memory.pool import Moves

LANES = 16
"""Number of tokens in a panel: the scores of its keys fill a vector of any instruction set."""


class KVCache:
    """[pages, layers, 2, kv_heads, panels, LANES · padded dim] fp32 or bf16; each page is
    contiguous.

    The tokens of a page are stored in panels of LANES; the last panel is partly used if the block
    is no multiple of LANES. A panel's keys are [dim, LANES] and its values [LANES, dim]; in bf16
    they are interleaved in pairs, [dim / 2, LANES, 2] and [LANES / 2, dim, 2]. dim is padded with
    zeros to a multiple of LANES. `cache[:, layer, 0]` holds keys and `cache[:, layer, 1]` values.
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
        """Return the address of the page's first byte, a multiple of 64."""
        return self.cache.data_ptr() + page * self.page_bytes

    def move(self, moves: Moves) -> None:
        """Copy whole pages; no page is both read and written."""
        if moves:
            self.cache[list(moves.values())] = self.cache[list(moves)]

    def is_finite(self, pages: Sequence[int]) -> bool:
        """Return whether keys and values of these pages are finite. The last layer shows it: a
        position that is not finite in any layer is not finite in the layers after it."""
        # Page by page, since gathering them first would take longer than reading them.
        ranges = (torch.aminmax(self.cache[page, -1]) for page in pages)
        return all(math.isfinite(low) and math.isfinite(high) for low, high in ranges)

    def clear(self, pages: range) -> None:
        """Zero the contiguous pages of an evicted adapter, since padding has to be zero."""
        self.cache[pages.start : pages.stop].zero_()

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view [pages, kv_heads, panels, dim / 2, 2, LANES] of one layer's keys."""
        pairs = self._pairs(self.cache[:, layer, 0], self._padded, LANES)
        return pairs[..., : self.head_dim // 2, :, :]

    def values(self, layer: int) -> torch.Tensor:
        """Return a view [pages, kv_heads, panels, LANES / 2, 2, dim] of one layer's values."""
        return self._pairs(self.cache[:, layer, 1], LANES, self._padded)[..., : self.head_dim]

    def _pairs(self, panels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return panels […, rows · columns], as stored, as a view […, rows / 2, 2, columns]."""
        leading = panels.shape[:-1]
        if self.cache.dtype == torch.bfloat16:
            return panels.view(*leading, rows // 2, columns, 2).transpose(-2, -1)
        return panels.view(*leading, rows // 2, 2, columns)


def page_shape(
    layers: int, block: int, kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Return the shape of a page: [layers, 2, kv_heads, panels, LANES · padded dim]."""
    padded = -(-head_dim // LANES) * LANES
    return layers, 2, kv_heads, -(-block // LANES), LANES * padded


def page_bytes(layers: int, block: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the size of a page in bytes."""
    return math.prod(page_shape(layers, block, kv_heads, head_dim)) * dtype.itemsize

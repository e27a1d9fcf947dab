"""KV cache: the memory of all pages, and the block tables that say which pages a sequence has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vlora.device.device import HOST, Device, PageLayout
from vlora.memory.pool import Moves, PagePool
from vlora.memory.prefix import BlockKey, PrefixCache

# Number of tokens in a panel, the unit in which attention reads keys and values on a CPU. The
# attention scores of a panel fill whole vectors of any instruction set.
LANES = 16


class KVCache:
    """Keys and values of all pages, in fp32 or bf16, or in fp16 on a GPU.

    On a GPU, `cache` is [pages, layers, 2, kv_heads, block, padded dim], with a row for each token.
    On a CPU it is [pages, layers, 2, kv_heads, panels, LANES · padded dim]. In both, each page is
    contiguous, `cache[:, layer, 0]` contains keys and `cache[:, layer, 1]` values.

    A panel has LANES tokens, or fewer at the end of a page: keys [dim, LANES] and values [LANES,
    dim]. In bf16, they are pairs of adjacent dimensions, [dim / 2, LANES, 2], and pairs of adjacent
    tokens, [LANES / 2, dim, 2]. dim is padded with zeros to a multiple of LANES.
    """

    def __init__(
        self,
        pages: int,
        layers: int,
        block: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: Device = HOST,
    ) -> None:
        self.layout = device.page_layout
        self._in_host_memory = device.in_host_memory
        self.block = block
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        shape = page_shape(layers, block, kv_heads, head_dim, self.layout)
        self._padded = _padded(head_dim)
        self.cache = device.zeros(pages, *shape, dtype=dtype)

    @property
    def page_bytes(self) -> int:
        return self.cache.stride(0) * self.cache.itemsize

    def address(self, page: int) -> int | None:
        """Return the address, a multiple of 64, of a page; None if the CPU cannot write there."""
        if not self._in_host_memory:
            return None
        return self.cache.data_ptr() + page * self.page_bytes

    def move(self, moves: Moves) -> None:
        """Copy whole pages. No page may be both read and written."""
        if moves:
            self.cache[list(moves.values())] = self.cache[list(moves)]

    def is_finite(self, pages: Sequence[int]) -> bool:
        """Return whether all keys and values of these pages are finite."""
        # A value that is not finite in any layer makes the keys and values of its position not
        # finite in all later layers, so only the last layer is read.
        # Pages are read one by one, because gathering them first would take longer. All results are
        # copied to the host at once, because each copy from a GPU waits for it.
        extremes = [value for page in pages for value in torch.aminmax(self.cache[page, -1])]
        return not extremes or all(map(math.isfinite, torch.stack(extremes).tolist()))

    def clear(self, pages: range) -> None:
        """Set the pages of an evicted adapter to zero, since attention reads padding, which must be
        zero.
        """
        self.cache[pages.start : pages.stop].zero_()

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's keys and values on a GPU, [pages, kv_heads, block, padded]."""
        return self.cache[:, layer, 0], self.cache[:, layer, 1]

    def keys(self, layer: int) -> torch.Tensor:
        """Return one layer's keys as a view [pages, kv_heads, panels, dim / 2, 2, LANES]."""
        pairs = self._pairs(self.cache[:, layer, 0], self._padded, LANES)
        return pairs[..., : self.head_dim // 2, :, :]

    def values(self, layer: int) -> torch.Tensor:
        """Return one layer's values as a view [pages, kv_heads, panels, LANES / 2, 2, dim]."""
        return self._pairs(self.cache[:, layer, 1], LANES, self._padded)[..., : self.head_dim]

    def _pairs(self, panels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        leading = panels.shape[:-1]
        if self.cache.dtype == torch.bfloat16:
            return panels.view(*leading, rows // 2, columns, 2).transpose(-2, -1)
        return panels.view(*leading, rows // 2, 2, columns)


def page_shape(
    layers: int, block: int, kv_heads: int, head_dim: int, layout: PageLayout = "panels"
) -> tuple[int, int, int, int, int]:
    """Return the shape of a page (see `KVCache`)."""
    if layout == "rows":
        return layers, 2, kv_heads, block, _padded(head_dim)
    return layers, 2, kv_heads, -(-block // LANES), LANES * _padded(head_dim)


def page_bytes(
    layers: int,
    block: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: PageLayout = "panels",
) -> int:
    return math.prod(page_shape(layers, block, kv_heads, head_dim, layout)) * dtype.itemsize


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


def pages_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class BlockTable:
    """Pages of one sequence. Position p is in `pages[p // block_size]`, at index `p % block_size`.
    The table holds them until `clear`; whole blocks may be shared through `prefix`.
    """

    def __init__(self, pool: PagePool, block_size: int, prefix: PrefixCache | None = None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._prefix = prefix
        self._shared_blocks = 0
        self.pages: list[int] = []

    def reuse_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Fill an empty table with the cached pages of its first blocks, whose keys are given.
        Return the number of positions in them.
        """
        assert not self.pages, "the table is not empty"
        if self._prefix is not None:
            self.pages = self._prefix.acquire(keys)
        self._shared_blocks = len(self.pages)
        return self._shared_blocks * self._block_size

    def has_unshared_block(self, computed: int) -> bool:
        """Return whether `computed` tokens fill a block that is not in the prefix cache yet."""
        return self._prefix is not None and computed // self._block_size > self._shared_blocks

    def share(self, keys: Sequence[BlockKey]) -> None:
        """Add the first `len(keys)` blocks, which must be computed, to the prefix cache. If a new
        one contains a value that is not finite, no block is added.
        """
        if self._prefix is None:
            return
        if self._prefix.is_finite(self.pages[self._shared_blocks : len(keys)]):
            for index in range(self._shared_blocks, len(keys)):
                self._prefix.add(keys[index], self.pages[index])
            self._shared_blocks = max(self._shared_blocks, len(keys))

    def discard_shared(self) -> None:
        """Remove all blocks of this table from the prefix cache; the table keeps its pages."""
        if self._prefix is not None:
            self._prefix.discard(self.pages)

    def fits(self, tokens: int, released: int) -> bool:
        """Return whether `grow` could succeed if other tables first released `released` pages."""
        missing = pages_for(tokens, self._block_size) - len(self.pages)
        return self._pool.can_allocate(missing - released)

    def grow(self, tokens: int) -> bool:
        """Allocate pages until the table has enough for `tokens` tokens. Return False, and allocate
        nothing, if there are too few pages.
        """
        missing = pages_for(tokens, self._block_size) - len(self.pages)
        if missing <= 0:
            return True
        pages = self._pool.allocate(missing)
        if pages is None:
            return False
        self.pages.extend(pages)
        return True

    def relocate(self, moves: Moves) -> None:
        """Update the page numbers after the content of pages was moved."""
        self.pages = [moves.get(page, page) for page in self.pages]

    def clear(self) -> None:
        if self._prefix is None:
            self._pool.release(self.pages)
        else:
            self._prefix.release(self.pages)
        self.pages = []
        self._shared_blocks = 0

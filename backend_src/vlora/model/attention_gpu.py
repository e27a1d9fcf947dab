"""Paged attention of a step on a GPU: the tables that its kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vlora.kernels import on_gpu
from vlora.kernels.ops import HeadNorms
from vlora.memory.kv_cache import KVCache
from vlora.model.chunk import Chunk
from vlora.model.rotary import Rotary

# Minimum number of positions in each part of the longest context, if contexts are split among GPU
# programs (instances of a kernel that run in parallel).
SPLIT_POSITIONS = 512
MAX_SPLITS = 32  # Maximum number of parts into which a context is split.
# Maximum number of GPU programs of a decode kernel that splits contexts: two per multiprocessor of
# an H100.
PROGRAMS = 264


class DecodeShape(NamedTuple):
    """Padded size of the tables of a step of decoding rows, with 1 or 3 axes of positions."""

    rows: int
    pages: int
    axes: int


class GpuPlan:
    """Tables that the attention kernels read in one step.

    Chunks of one row use the decode kernel. Longer ones are cut into tiles for the prefill kernel.
    Rows added by padding have no context and write no keys.

    Raises ValueError for a chunk whose pages do not cover it or are not in the cache.
    """

    def __init__(
        self, chunks: Sequence[Chunk], kv_cache: KVCache, padded: DecodeShape | None = None
    ) -> None:
        self._kv_cache = kv_cache
        single = [chunk for chunk in chunks if chunk.length == 1]
        longer = [chunk for chunk in chunks if chunk.length > 1]
        ends = [chunk.end for chunk in single]
        more, width, longest = 0, 0, max(ends, default=0)
        if padded is not None:
            more, width = padded.rows - len(chunks), padded.pages
            longest = width * kv_cache.block
        count = len(single) + more
        self._splits = splits(count, kv_cache.kv_heads, longest)
        slots = [slot for chunk in chunks for slot in self._slots(chunk)]
        # Tables in host memory, all int32.
        self.inputs = [
            _int32([*slots, *[-1] * more]),
            _int32([*(chunk.row for chunk in single), *range(len(chunks), len(chunks) + more)]),
            _int32([*ends, *[0] * more]),
            F.pad(self._tables(single, width), (0, 0, 0, more)),
            torch.zeros(count * kv_cache.kv_heads, dtype=torch.int32),
            _int32(self._tiles(longer)).view(-1, 4),
            self._tables(longer),
        ]
        self._placed = self.inputs

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Store the copies of `inputs` that were made on the device."""
        self._placed = list(uploaded)

    def attend(
        self,
        layer: int,
        heads: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        head_norms: HeadNorms | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute `AttentionPlan.attend`, with one launch, which leaves `qkv` unchanged, if every
        chunk has one row.
        """
        kv_cache, launches = self._kv_cache, on_gpu.launches()
        dim = kv_cache.head_dim
        keys, values = kv_cache.rows(layer)
        if out is None:
            out = qkv.new_empty(len(qkv), heads * dim)
        slots, rows, ends, tables, counters, tiles, tile_tables = self._placed
        contexts = launches.DecodeRows(rows, ends, tables, counters, self._splits)
        if not len(tiles):
            rotation = launches.Rotation(rotary.cosines, rotary.sines, head_norms)
            launches.decode(out, qkv, keys, values, contexts, heads, dim, rotation)
            return out
        if head_norms is not None:
            query, key, eps = head_norms
            launches.head_norm(qkv, query, key, heads, kv_cache.kv_heads, eps)
        launches.rotate(qkv, keys, values, rotary.cosines, rotary.sines, slots, heads, dim)
        launches.decode(out, qkv, keys, values, contexts, heads, dim)
        launches.prefill(out, qkv, keys, values, tiles, tile_tables, heads, dim)
        return out

    def _slots(self, chunk: Chunk) -> list[int]:
        # The slot of a row's keys is page · block + offset.
        block, pages = self._kv_cache.block, chunk.pages
        needed = pages[: -(-chunk.end // block)]
        if len(needed) * block < chunk.end:
            raise ValueError(f"{len(pages)} pages of {block} positions do not cover {chunk.end}")
        total = len(self._kv_cache.cache)
        if needed and not 0 <= (first := min(needed)) <= (last := max(needed)) < total:
            wrong = first if first < 0 else last
            raise ValueError(f"page {wrong} is not among the {total} pages of the cache")
        return [
            pages[position // block] * block + position % block
            for position in range(chunk.start, chunk.end)
        ]

    def _tables(self, chunks: Sequence[Chunk], width: int = 0) -> torch.Tensor:
        counts = [-(-chunk.end // self._kv_cache.block) for chunk in chunks]
        longest = max(counts, default=0) if width == 0 else width
        lines = [
            [*chunk.pages[:count], *[0] * (longest - count)]
            for chunk, count in zip(chunks, counts, strict=True)
        ]
        return _int32(lines).view(len(chunks), longest)

    def _tiles(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Return (first row, number of rows, first position, index of the chunk) of each tile."""
        rows = on_gpu.launches().PREFILL_ROWS[self._kv_cache.cache.itemsize]
        return [
            [chunk.row + first, min(rows, chunk.length - first), chunk.start + first, line]
            for line, chunk in enumerate(chunks)
            for first in range(0, chunk.length, rows)
        ]


def splits(rows: int, kv_heads: int, longest: int) -> int:
    """Return the number of parts into which contexts are split, a power of two to limit kernel
    variants: the largest with which at most PROGRAMS programs run and each part of the longest
    context has at least SPLIT_POSITIONS positions, from 1 to MAX_SPLITS.
    """
    wanted = min(PROGRAMS // max(rows * kv_heads, 1), longest // SPLIT_POSITIONS, MAX_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _int32(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)

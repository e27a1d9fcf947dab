"""CPU backend of the search: prunes configurations and runs the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from vlora.atmm import op, tiles
from vlora.atmm.cpu import Cpu
from vlora.atmm.groups import LoraGroup
from vlora.atmm.search.search import Shape
from vlora.atmm.types import LoraPair, MergeUpdate, Segment, Segments

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_SLOTS = 4096
# Analytic limits. A share is the part of a cache that one operand may use, since the other operand
# and y pass through the cache as well. Only streaming is tried up to FEW_ROWS rows, and only
# blocking from MANY_ROWS rows on.
INTERMEDIATE_SHARE_OF_L2 = 0.5
PANELS_SHARE_OF_L2 = 0.5
# Row block of the streaming kernels, which read an adapter once from memory into registers.
STREAMING_BLOCK = 8
# Maximum number of rows at which reading adapters limits a call, so that larger row blocks are no
# faster.
FEW_ROWS = 8
MANY_ROWS = 32  # Number of rows from which on streaming reads each adapter four times or more.
SCRATCH_BYTES = 4  # Bytes of an element of the intermediate result x Aᵀ.
# Keys of a configuration other than its blocks and tiles.
OTHER_KEYS = ("depth_block", "prefetch", "column_block")


def why_not(config: Mapping[str, Any], shape: Shape, device: Cpu, element_bytes: int) -> str | None:
    """Return the first limit that a configuration exceeds for a shape, or None."""
    l2 = device.l2 << 10
    if shape.operation == "merge":
        panels = int(config["column_block"]) * shape.rank * SCRATCH_BYTES
        return "the block of A does not fit into L2" if panels > l2 else None
    row_block = int(config["row_block"])
    shrink = int(config["shrink_columns"])
    depth = int(config["depth_block"])
    if (row_block == STREAMING_BLOCK) != (shape.rows <= FEW_ROWS):
        if shape.rows <= FEW_ROWS:
            return "there are too few rows for a block"
        if shape.rows >= MANY_ROWS:
            return "streaming would read the adapter too often"
    if row_block == STREAMING_BLOCK and shape.rows > FEW_ROWS and int(config["prefetch"]):
        return "the adapter is in the cache in later passes"
    if row_block * shape.rank * SCRATCH_BYTES > INTERMEDIATE_SHARE_OF_L2 * l2:
        return "the intermediate exceeds its share of L2"
    if shrink * depth * element_bytes > PANELS_SHARE_OF_L2 * l2:
        return "the panels that row tiles share exceed their share of L2"
    return None


class CpuBackend:
    """Backend that profiles `vlora.atmm.op` for one storage type on `threads` threads."""

    def __init__(self, dtype: str, threads: int) -> None:
        self.dtype = dtype
        self._threads = threads
        self._device = Cpu.here()
        self._all = {
            operation: {c["name"]: (i, c) for i, c in enumerate(tiles.configs(operation, dtype))}
            for operation in ("apply", "merge")
        }

    @property
    def digest(self) -> str:
        """Hash of the compiled configurations. A search reuses only results with this hash."""
        names = sorted(name for known in self._all.values() for name in known)
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]

    def key(self, shape: Shape) -> str:
        return f"{tiles.key(shape.operation, self.dtype, **self._sizes(shape)):032x}"

    def built_in(self, shape: Shape) -> str:
        return tiles.built_in(shape.operation, self.dtype, **self._sizes(shape))

    def configs(self, shape: Shape) -> Sequence[str]:
        """Return the configurations within all limits.

        If several configurations run the same code, only one is returned, the built-in one if it is
        among them.
        """
        built_in = self.built_in(shape)
        widest = tiles.widest(self.dtype)
        kept: dict[tuple[Any, ...], tuple[bool, int, str]] = {}
        for name, (_, config) in self._all[shape.operation].items():
            if why_not(config, shape, self._device, DTYPES[self.dtype].itemsize) is not None:
                continue
            block = int(config["row_block"])
            # A block of all rows equals no block. A tile is at most as wide as the registers and
            # its matrix.
            same = (
                "all" if shape.operation == "apply" and block >= shape.rows else block,
                min(int(config["shrink_columns"]), widest, -(-shape.rank // 16) * 16),
                min(int(config["expand_columns"]), widest),
                *(config[key] for key in OTHER_KEYS),
            )
            kept[same] = min(kept.get(same, (True, block, name)), (name != built_in, block, name))
        return [name for _, _, name in kept.values()] or [built_in]

    def prepare(
        self, shape: Shape, configs: Sequence[str], *, cold: bool
    ) -> Mapping[str, Callable[[], None]]:
        if shape.operation == "merge":
            return self._merge(shape, configs)
        group = self._group(shape.d_in, shape.d_out, shape.rank)
        turns = max(1, len(group) // shape.segments) if cold else 1
        steps = [
            Segments(
                Segment(i * shape.rows, shape.rows, (turn * shape.segments + i) % len(group))
                for i in range(shape.segments)
            )
            for turn in range(turns)
        ]
        x = torch.randn(shape.rows * shape.segments, shape.d_in).to(DTYPES[self.dtype])
        y = torch.zeros(shape.rows * shape.segments, shape.d_out, dtype=DTYPES[self.dtype])
        # All configurations share this counter, so each call uses other adapters than the one
        # before it, whichever configuration that had.
        turn = [0]

        def call_of(index: int) -> Callable[[], None]:
            def call() -> None:
                turn[0] = (turn[0] + 1) % turns
                op.apply(y, x, steps[turn[0]], group, config=index, threads=self._threads)

            return call

        return {name: call_of(self._all["apply"][name][0]) for name in configs}

    def _merge(self, shape: Shape, configs: Sequence[str]) -> Mapping[str, Callable[[], None]]:
        slab = torch.randn(shape.d_out * shape.d_in).to(DTYPES[self.dtype])
        out = torch.empty_like(slab)
        pair = LoraPair(torch.randn(shape.rank, shape.d_in), torch.randn(shape.d_out, shape.rank))

        def call_of(index: int) -> Callable[[], None]:
            return lambda: op.merge(
                out, slab, [MergeUpdate(0, pair)], config=index, threads=self._threads
            )

        return {name: call_of(self._all["merge"][name][0]) for name in configs}

    @lru_cache(maxsize=1)  # noqa: B019 — It keeps one group, and the search keeps the backend.
    def _group(self, d_in: int, d_out: int, rank: int) -> LoraGroup:
        dtype = DTYPES[self.dtype]
        pair = LoraPair(torch.randn(rank, d_in).to(dtype), torch.randn(d_out, rank).to(dtype))
        size = rank * (d_in + d_out) * dtype.itemsize
        slots = min(MOST_SLOTS, max(16, self._device.cold_bytes // size))
        return LoraGroup.of(d_in, [pair] * slots)

    def _sizes(self, shape: Shape) -> dict[str, int]:
        sizes = {name: size for name, size in vars(shape).items() if name != "operation"}
        return {**sizes, "threads": self._threads}

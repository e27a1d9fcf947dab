"""CUDA backend of the search: selects candidates and times them.

Candidates are tiles of the compiled library, ordered by the cost formula that also chooses without
a table. The best one for hot and cold adapters replaces the built-in choice only if it is faster by
more than the noise. Of other packages, this module imports only torch, for machines without others.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vlora.atmm.cuda.choice import (
    SLICES,
    TABLE_VERSION,
    KernelChoice,
    Shape,
    built_in,
    by_rows,
    expand_cost,
    shrink_cost,
)
from vlora.atmm.cuda.operator import DTYPES, Operator, table_path
from vlora.atmm.cuda.segments import DeviceSegments
from vlora.atmm.cuda.tables import DeviceGroup
from vlora.atmm.search.gpu_timing import GpuTiming, GpuWork, interleaved
from vlora.atmm.search.search import State
from vlora.atmm.types import LoraPair, Segment
from vlora.atomic_file import replace_text

SIDES = ((4096, 4096), (1024, 1024))
RANKS = (64, 16, 128)
SEGMENTS = (8, 1, 32)
ROWS = (1, 4, 16, 64, 256, 1024)
MAX_ROWS = 8192  # Maximum number of rows of a call. Larger calls repeat the same blocks.
# Maximum number of rows of a segment for which kernels without tensor cores are tried.
ROWS_WORTH_ROW_KERNELS = 32
# Maximum number of pairs (shrink tile, number of slices) to try. Those with the lowest cost are
# tried, and MAX_SHRINK_TILES - 2 expand tiles at most.
MAX_SHRINK_TILES = 6
# Bytes of adapters that the calls of a cold profile use in turn: several times the size of L2.
COLD_BYTES = 256 << 20
MAX_LAYERS = 128
ROUNDS, DUEL_ROUNDS = 3, 9


def shapes(dtypes: Sequence[str] = ("bf16", "fp16")) -> list[Shape]:
    """Return the shapes to search, the most important ones first."""
    return [
        Shape(dtype, rows, d_in, d_out, rank, segments)
        for dtype in dtypes
        for rank in RANKS
        for segments in SEGMENTS
        for d_in, d_out in SIDES
        for rows in ROWS
        if rows * segments <= MAX_ROWS
    ]


@dataclass
class Data:
    """Data of one shape: adapters of one layer (hot), or of more layers than L2 holds (cold)."""

    y: torch.Tensor
    x: torch.Tensor
    segments: DeviceSegments
    layers: list[DeviceGroup]

    def work(self, operator: Operator, choice: KernelChoice) -> GpuWork:
        def call(group: DeviceGroup) -> Any:
            return lambda: operator.apply(self.y, self.x, self.segments, group, choice)

        return GpuWork([call(group) for group in self.layers], graph=True)


class CudaSearch:
    """Search for the best kernels and tiles on one GPU."""

    def __init__(self, operator: Operator, cold_bytes: int = COLD_BYTES) -> None:
        self._operator, self._cold_bytes = operator, cold_bytes

    def built_in(self, shape: Shape) -> KernelChoice:
        operator = self._operator
        return built_in(shape, operator.library, operator.multiprocessors, tensor_cores=True)

    def candidates(self, shape: Shape) -> list[KernelChoice]:
        """Return the choices to measure, the built-in one first."""
        library, sms = self._operator.library, self._operator.multiprocessors
        found = [self.built_in(shape)]
        if shape.rows <= ROWS_WORTH_ROW_KERNELS:
            base = by_rows(shape, sms)
            near = [s for s in SLICES if base.row_slices / 4 <= s <= base.row_slices * 4]
            blocks = (1,) if shape.rows == 1 else (1, 4)
            found += [
                KernelChoice(row_block=block, row_slices=s)
                for block in blocks
                for s in near
                if shape.d_in // s >= 128
            ]
        if shape.rows >= 4:
            shrinks = sorted(
                (shrink_cost(shape, tile, s, sms), s, tile.name)
                for tile in library.tiles_of("shrink", shape.dtype).values()
                for s in SLICES
                if shape.d_in // s >= 128
            )[:MAX_SHRINK_TILES]
            expands = sorted(
                (expand_cost(shape, tile, sms), tile.name)
                for tile in library.tiles_of("expand", shape.dtype).values()
            )[: MAX_SHRINK_TILES - 2]
            if shrinks and expands:
                up_to = min(shape.rows - 1, found[0].rows_up_to)
                pairs = [(name, s, expands[0][1]) for _, s, name in shrinks]
                pairs += [(shrinks[0][2], shrinks[0][1], name) for _, name in expands]
                found += [KernelChoice(a, b, slices=s, rows_up_to=up_to) for a, s, b in pairs]
        return list(dict.fromkeys(found))

    def data(self, shape: Shape, *, cold: bool) -> Data:
        dtype = next(one for one, name in DTYPES.items() if name == shape.dtype)
        device = self._operator.device
        size = shape.segments * shape.rank * (shape.d_in + shape.d_out) * dtype.itemsize
        count = min(MAX_LAYERS, max(2, math.ceil(self._cold_bytes / size))) if cold else 1
        layers = []
        for _ in range(count):
            group = DeviceGroup(shape.d_in, [shape.d_out], dtype, device)
            for _ in range(shape.segments):
                a = torch.randn(shape.rank, shape.d_in, device=device) / shape.d_in**0.5
                b = torch.randn(shape.d_out, shape.rank, device=device) / shape.rank**0.5
                group.append([LoraPair(a.to(dtype), b.to(dtype))])
            group.ready()
            layers.append(group)
        rows = shape.rows * shape.segments
        x = torch.randn(rows, shape.d_in, device=device).to(dtype)
        y = torch.randn(rows, shape.d_out, device=device).to(dtype)
        segments = [Segment(i * shape.rows, shape.rows, i) for i in range(shape.segments)]
        return Data(y, x, self._operator.segments(segments), layers)

    def best(self, shape: Shape) -> dict[str, Any]:
        """Return the table entry of one shape.

        It is the choice with the smallest product of hot and cold time if that beats the built-in
        choice by more than the noise of both.
        """
        hot, cold = self.data(shape, cold=False), self.data(shape, cold=True)
        choices = self.candidates(shape)
        of_hot = self._times(hot, choices, ROUNDS)
        of_cold = self._times(cold, choices, ROUNDS)
        winner = min(choices, key=lambda one: of_hot[one].median * of_cold[one].median)
        default = self.built_in(shape)
        two = [default] if winner == default else [default, winner]
        of_hot, of_cold = (self._times(data, two, DUEL_ROUNDS) for data in (hot, cold))
        if winner != default and not _beats(winner, default, of_hot, of_cold):
            winner = default
        return {
            "key": shape.key,
            "config": winner.name,
            "hot_us": _us(of_hot[winner]),
            "cold_us": _us(of_cold[winner]),
            "built_in": default.name,
            "built_in_hot_us": _us(of_hot[default]),
            "built_in_cold_us": _us(of_cold[default]),
            "tried": len(choices),
            "shape": asdict(shape),
        }

    def _times(
        self, data: Data, choices: Sequence[KernelChoice], rounds: int
    ) -> dict[KernelChoice, GpuTiming]:
        timed = interleaved({one.name: data.work(self._operator, one) for one in choices}, rounds)
        return {one: timed[one.name] for one in choices}

    def search(
        self, wanted: Sequence[Shape], file: Path, seconds: float
    ) -> Iterator[dict[str, Any]]:
        """Yield entries: first those stored in `file`, then new ones, which are added to it.

        Ends before a shape for which the time left would probably not suffice.
        """
        end, longest = time.monotonic() + seconds, 0.0
        state = State(file, f"{self._operator.name} {_digest(self._operator)}")
        yield from list(state.done.values())
        for shape in wanted:
            if shape.key in state.done:
                continue
            started = time.monotonic()
            if started + 1.5 * longest > end:
                return
            entry = self.best(shape)
            longest = max(longest, time.monotonic() - started)
            state.add(entry)
            yield entry


def _beats(
    winner: KernelChoice,
    default: KernelChoice,
    hot: dict[KernelChoice, GpuTiming],
    cold: dict[KernelChoice, GpuTiming],
) -> bool:
    gain = (hot[default].median * cold[default].median) / (hot[winner].median * cold[winner].median)
    noise = max(one[of].noise for one in (hot, cold) for of in (winner, default))
    return gain > (1 + noise) ** 2


def _us(timed: GpuTiming) -> float:
    return round(timed.median * 1e6, 2)


def _digest(operator: Operator) -> str:
    return " ".join(f"{t.kind}/{t.dtype}/{t.name}" for t in operator.library.tiles)


def write_table(operator: Operator, entries: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write the table in the form that `vlora.atmm.cuda.operator` reads."""
    path = table_path(operator.name, folder)
    kept = ("config", "hot_us", "cold_us", "built_in", "built_in_hot_us", "built_in_cold_us")
    table = {
        "version": TABLE_VERSION,
        "device": operator.name,
        "searched": {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        "entries": {
            e["key"]: {k: e[k] for k in kept} for e in sorted(entries, key=lambda e: e["key"])
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(table, indent=1) + "\n")
    return path

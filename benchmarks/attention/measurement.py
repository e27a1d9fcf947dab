"""`vlora bench attention`: attention over pages beside its twin and the machine's limit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cells import DTYPES
from benchmarks.machine import MULTIPLY, READ, Beside
from benchmarks.roofline import Limits
from benchmarks.synthetic_model import fill
from benchmarks.timing import Timing, geometric_mean, interleaved
from vlora.atmm.device import Device
from vlora.backends import Backend
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.inputs import Prompt
from vlora.model.rotary import Rotary

KERNEL, TWIN = "kernel", "twin"
COLD_BYTES = Device.here().cold_bytes
"""Of all layers together: no cache holds them until their next turn."""
READ_BYTES = 64 << 20
MULTIPLY_ROUNDS = 1_000_000
MIXED_DECODES = 8
"""Requests that decode beside the chunk of a mixed step."""
GROUP_KEYS = {"phase", "heads", "rows", "contexts", "quick"}


@dataclass(frozen=True)
class Cell:
    """decode: `rows` requests of one row, each after `context` positions. prefill: one chunk of
    `rows` that starts its sequence. mixed: such a chunk after `context`, and eight that decode."""

    phase: str
    name_of_heads: str
    heads: int
    kv_heads: int
    dim: int
    block: int
    rows: int
    context: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.phase} {self.rows} at {self.context}, {self.name_of_heads}, {self.dtype}"

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(rows, positions before them)."""
        if self.phase == "decode":
            return ((1, self.context),) * self.rows
        alone = ((self.rows, self.context),)
        return alone + ((1, self.context),) * MIXED_DECODES if self.phase == "mixed" else alone

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that are read, of one layer."""
        seen = sum(rows + start for rows, start in self.chunks)
        return 2 * seen * self.kv_heads * self.dim * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Of both products, of what the causal mask lets through."""
        pairs = sum(rows * start + rows * (rows + 1) // 2 for rows, start in self.chunks)
        return 4 * pairs * self.heads * self.dim


@dataclass(frozen=True)
class Effort:
    rounds: int
    budget: float


QUICK, FULL = Effort(5, 0.15), Effort(9, 1.0)


@dataclass(frozen=True)
class Result:
    """rate: bytes/s from memory, and peak: flop/s, by this cell's rounds."""

    cell: Cell
    timings: Mapping[str, Timing]
    rate: float
    peak: float

    @property
    def limit(self) -> float:
        """Seconds."""
        return max(self.cell.kv_bytes / self.rate, self.cell.flops / self.peak)

    @property
    def vs_twin(self) -> float:
        """Time of the twin over that of the kernel."""
        return self.timings[TWIN].median / self.timings[KERNEL].median

    @property
    def roofline(self) -> float:
        """Limit over time."""
        return self.limit / self.timings[KERNEL].median

    def as_row(self) -> dict[str, Any]:
        cell = self.cell
        return {
            "phase": cell.phase,
            "heads": cell.name_of_heads,
            "rows": cell.rows,
            "context": cell.context,
            "dtype": cell.dtype,
            "us": {name: round(t.median * 1e6, 1) for name, t in self.timings.items()},
            "noise": {name: round(t.noise, 3) for name, t in self.timings.items()},
            "limit_us": round(self.limit * 1e6, 1),
            "vs_twin": round(self.vs_twin, 3),
            "roofline": round(self.roofline, 3),
        }


def load_grid(path: Path, dtypes: Sequence[str], *, quick: bool) -> list[Cell]:
    """All cells of a grid file; with quick what each group's own `quick` says in place of its
    lists. Raises ValueError for an unknown key."""
    grid = json.loads(path.read_text())
    cells = []
    for group in grid["groups"]:
        if set(group) != GROUP_KEYS:
            raise ValueError(f"{path.name}: {sorted(set(group) ^ GROUP_KEYS)} unknown or missing")
        chosen = group | group["quick"] if quick else group
        for dtype, heads, rows, context in itertools.product(
            dtypes, chosen["heads"], chosen["rows"], chosen["contexts"]
        ):
            of, kv = grid["heads"][heads]
            dim, block = grid["dim"], grid["block"]
            cells.append(Cell(group["phase"], heads, of, kv, dim, block, rows, context, dtype))
    return cells


class Bed:
    """Pages with random keys and values of enough layers to be cold, and a step's rows."""

    def __init__(self, cell: Cell) -> None:
        pages_of = [-(-(rows + start) // cell.block) for rows, start in cell.chunks]
        self.layers = max(2, -(-COLD_BYTES // cell.kv_bytes))
        self.store = KVCache(
            sum(pages_of), self.layers, cell.block, cell.kv_heads, cell.dim, DTYPES[cell.dtype]
        )
        fill(self.store.cache)
        pages = iter(torch.randperm(sum(pages_of)).tolist())
        self.chunks, row = [], 0
        for (rows, start), count in zip(cell.chunks, pages_of, strict=True):
            tokens = (0,) * rows
            own = tuple(itertools.islice(pages, count))
            prompt = Prompt.of_text(tokens)
            self.chunks.append(Chunk(str(row), 0, row, start, tokens, prompt, own, True))
            row += rows
        self.heads, self.dim = cell.heads, cell.dim
        self.qkv = torch.randn(row, (cell.heads + 2 * cell.kv_heads) * cell.dim)
        self.rotary = Rotary.from_angles(
            torch.zeros(row, cell.dim // 2), 1.0
        )  # rows stay what they are

    def attend(self, backend: Backend) -> Callable[[], None]:
        """One layer at each call, in turn."""
        plan = AttentionPlan(self.chunks, self.store, self.heads, backend=backend)
        turn = itertools.cycle(range(self.layers))
        out = torch.empty(len(self.qkv), self.heads * self.dim)

        def once() -> None:
            plan.attend(next(turn), self.qkv, self.rotary, out)

        return once


@torch.inference_mode()
def run(cells: Sequence[Cell], effort: Effort, limits: Limits) -> Iterator[Result]:
    for cell in cells:
        bed = Bed(cell)
        # A type that the unit for tiles multiplies has that unit's peak.
        peak_type = max(("fp32", cell.dtype), key=limits.peak)
        beside = Beside(peak_type, MULTIPLY_ROUNDS, READ_BYTES)
        timings = interleaved(
            {KERNEL: bed.attend("cpu"), TWIN: bed.attend("reference"), **beside.calls()},
            rounds=effort.rounds,
            warm=False,
            led=True,
            budget=effort.budget,
        )
        rate, peak = beside.rates(timings)
        own = {name: t for name, t in timings.items() if name not in (READ, MULTIPLY)}
        yield Result(
            cell,
            own,
            rate or limits.bandwidth(READ_BYTES, cold=True),
            peak or limits.peak(peak_type),
        )


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """vs_twin_worst: least speed-up over the twin. roofline_…: limit over time, geometric mean."""
    worst = min(results, key=lambda result: result.vs_twin)
    summary: dict[str, Any] = {
        "vs_twin_worst": round(worst.vs_twin, 3),
        "vs_twin_worst_cell": worst.cell.name,
    }
    for phase in ("decode", "prefill", "mixed"):
        found = geometric_mean([r.roofline for r in results if r.cell.phase == phase])
        summary[f"roofline_{phase}"] = None if found is None else round(found, 3)
    return summary

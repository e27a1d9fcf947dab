"""`vlora bench step`: one step of the engine beside its roofline, part by part."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import llava
from benchmarks import work_model as work
from benchmarks.machine import Beside
from benchmarks.roofline import Limits
from benchmarks.step.busy_core import slow_down
from benchmarks.step.footprint import footprints
from benchmarks.step.parts import ATTENTION, PARTS, clocked
from benchmarks.synthetic_model import NAMES, TestBed
from benchmarks.timing import Timing, geometric_mean, interleaved

ITEMSIZE = {"fp32": 4, "bf16": 2}
READ_BYTES = 256 << 20
MULTIPLY_ROUNDS = 2_000_000
"""Beside each round of steps: what the memory and the cores gave at the time."""
SPARE = 64
"""Positions in the pages beyond what the cells need."""
TYPICAL_ROWS, TYPICAL_CONTEXT = 16, 256
"""Of the decoding step that `elsewhere` and `python` are about."""


@dataclass(frozen=True)
class Effort:
    """rounds of all candidates of a cell; seconds for one of them; steps whose parts are timed one
    by one."""

    rounds: int
    budget: float
    profiled: int


QUICK = Effort(rounds=5, budget=0.3, profiled=1)
FULL = Effort(rounds=7, budget=4.0, profiled=3)


@dataclass(frozen=True)
class Cell:
    """decode: `rows` requests with `context` positions each. prefill: `rows` of one prompt, or of
    as many prompts as there are adapters. adapters: how many are used, by request i mod n."""

    phase: str
    model: str
    rows: int
    context: int
    adapters: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        context = f" at {self.context}" if self.phase == "decode" else ""
        return f"{self.phase} {self.rows}{context}, {self.model}, {self.dtype}"

    def requests(self, adapters: int) -> int:
        return self.rows if self.phase == "decode" else max(1, adapters)

    def known(self, adapters: int) -> int:
        """Tokens of a request at the step: its context and what is computed."""
        if self.phase == "decode":
            return self.context + 1
        return self.rows // self.requests(adapters)

    @property
    def positions(self) -> int:
        """That the pages must hold."""
        return self.requests(0) * (self.known(0) + 16)

    def work(self, adapters: int) -> work.Work:
        """Of the step with so many adapters."""
        requests, sizes = self.requests(adapters), llava.MODELS[self.model]
        count = 1 if self.phase == "decode" else self.known(adapters)
        rows = [
            work.Rows(count, self.context, i % adapters if adapters else None)
            for i in range(requests)
        ]
        return work.of_step(rows, sizes, ITEMSIZE[self.dtype])


@dataclass(frozen=True)
class Result:
    """timings, shares of time by part: by number of adapters. rate: bytes/s from memory, peak:
    flop/s, both by this cell's rounds. interpreter: seconds of the same step in a model too small
    to compute anything, or None where that was not measured."""

    cell: Cell
    timings: Mapping[int, Timing]
    shares: Mapping[int, Mapping[str, float]]
    rate: float
    peak: float
    interpreter: float | None = None

    def limit(self, adapters: int) -> float:
        """Seconds."""
        todo = self.cell.work(adapters)
        return max(todo.flops / self.peak, todo.moved / self.rate)

    def roofline(self, adapters: int = 0) -> float:
        """Limit over time: 1 = at the limit."""
        return self.limit(adapters) / self.timings[adapters].median

    def cost(self, adapters: int) -> float:
        """Time with adapters over time of the base model."""
        return self.timings[adapters].median / self.timings[0].median

    def cost_by_bytes(self, adapters: int) -> float:
        """The same, as the bytes alone have it."""
        return self.cell.work(adapters).moved / self.cell.work(0).moved

    @property
    def elsewhere(self) -> float:
        """Share of the base model's step that is no product, attention or LoRA."""
        return 1.0 - sum(self.shares[0].values())

    @property
    def python(self) -> float | None:
        """Share of the base model's step that does not shrink with the model."""
        return None if self.interpreter is None else self.interpreter / self.timings[0].median

    def as_row(self) -> dict[str, Any]:
        cell = self.cell
        return {
            "phase": cell.phase,
            "model": cell.model,
            "dtype": cell.dtype,
            "rows": cell.rows,
            "context": cell.context,
            "ms": {str(n): round(t.median * 1e3, 2) for n, t in self.timings.items()},
            "limit_ms": {str(n): round(self.limit(n) * 1e3, 2) for n in self.timings},
            "noise": {str(n): round(t.noise, 3) for n, t in self.timings.items()},
            "shares": {
                str(n): {part: round(share, 4) for part, share in shares.items()}
                for n, shares in self.shares.items()
            },
            "python": None if self.python is None else round(self.python, 4),
            "gflops": round(self.peak / 1e9, 1),
            "gb_per_s": round(self.rate / 1e9, 1),
        }


def load_grid(
    path: Path, dtypes: Sequence[str], models: Sequence[str] | None, *, quick: bool
) -> list[Cell]:
    """Cells in an order that needs each engine once: by model and type."""
    cells = []
    for group in json.loads(path.read_text())["groups"]:
        chosen = group | (group["quick"] if quick else {})
        for model, dtype, context, rows in itertools.product(
            chosen["models"], dtypes, chosen["contexts"], chosen["rows"]
        ):
            if models is None or model in models:
                adapters = tuple(chosen["adapters"])
                cells.append(Cell(chosen["phase"], model, rows, context, adapters, dtype))
    order = list(llava.MODELS)
    return sorted(cells, key=lambda cell: (order.index(cell.model), cell.dtype == "bf16"))


def run(
    cells: Sequence[Cell],
    effort: Effort,
    limits: Limits,
    root: Path | None = None,
    neighbour: Callable[[float], None] = lambda slower: None,
) -> Iterator[Result]:
    """Results as they come; one engine at a time. root: where the checkpoints are kept. neighbour:
    told, for each type of the first model, what a typical decoding step takes with one core taken
    by a busy process over what it takes alone."""
    for (model, dtype), found in itertools.groupby(cells, key=lambda c: (c.model, c.dtype)):
        batch = list(found)
        checkpoint = llava.make(llava.MODELS[model], root)
        typical = replace(batch[0], phase="decode", rows=TYPICAL_ROWS, context=TYPICAL_CONTEXT)
        first = model == cells[0].model
        bed = bed_for([*batch, typical] if first else batch, checkpoint, dtype)
        results = [measure(cell, bed, effort, limits) for cell in batch]
        if first:
            bed.stage(typical.rows, typical.known(0), typical.context)
            step = bed.step(bed.mix(typical.rows, 0))
            neighbour(slow_down(step, rounds=effort.rounds, budget=effort.budget))
        del bed
        tiny = bed_for(batch, llava.make(llava.tiny(checkpoint.sizes), root), dtype)
        for result in results:
            yield replace(result, interpreter=_interpreter(result.cell, tiny, effort))


def bed_for(cells: Sequence[Cell], checkpoint: llava.Checkpoint, dtype: str) -> TestBed:
    positions = max(cell.positions for cell in cells) + SPARE
    most = max(cell.rows for cell in cells)
    return TestBed(checkpoint, dtype, positions, most, adapters=True)


def measure(cell: Cell, bed: TestBed, effort: Effort, limits: Limits) -> Result:
    """The step with each number of adapters, in turn where they are the same requests."""
    peak_type = max(("fp32", cell.dtype), key=limits.peak)
    beside = Beside(peak_type, MULTIPLY_ROUNDS, READ_BYTES)
    timings: dict[int, Timing] = {}
    shares: dict[int, Mapping[str, float]] = {}
    rates: list[tuple[float | None, float | None]] = []
    for requests, same in itertools.groupby(cell.adapters, key=cell.requests):
        group = list(same)
        bed.stage(requests, cell.known(group[0]), cell.context)
        steps = {str(n): bed.step(bed.mix(requests, n)) for n in group}
        found = interleaved(
            steps | beside.calls(), rounds=effort.rounds, warm=False, budget=effort.budget
        )
        rates.append(beside.rates(found))
        timings |= {n: found[str(n)] for n in group}
        shares |= {n: _shares(steps[str(n)], effort.profiled) for n in group}
    limits.again_if_due()
    read, peak = (_mean(values) for values in zip(*rates, strict=True))
    return Result(
        cell,
        timings,
        shares,
        rate=read or limits.bandwidth(READ_BYTES, cold=True),
        peak=peak or limits.peak(peak_type),
    )


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """The keys of the issue; null where the grid holds no such cell."""
    summary: dict[str, Any] = {}
    for phase, dtype in itertools.product(("decode", "prefill"), ITEMSIZE):
        chosen = [r for r in results if (r.cell.phase, r.cell.dtype) == (phase, dtype)]
        summary[f"{phase}_{dtype}"] = _rounded([r.roofline() for r in chosen])
    decode = [r for r in results if r.cell.phase == "decode"]
    for n in (1, 16):
        chosen = [r for r in decode if n in r.timings]
        summary[f"lora_cost_{n}"] = _rounded([r.cost(n) for r in chosen])
        by_bytes = [r.cost(n) / r.cost_by_bytes(n) for r in chosen]
        summary[f"lora_cost_{n}_over_bytes"] = _rounded(by_bytes)
    typical = [r for r in decode if r.cell.rows == TYPICAL_ROWS]
    summary["elsewhere"] = _rounded([r.elsewhere for r in typical])
    summary["python"] = _rounded([r.python for r in typical if r.python is not None])
    return summary


def memory(cells: Sequence[Cell], root: Path | None = None) -> dict[str, Any]:
    """Of the grid's first model, by type."""
    dtypes = sorted({cell.dtype for cell in cells}, reverse=True)
    folder = llava.make(llava.MODELS[cells[0].model], root).folder
    found = footprints(folder, [NAMES[dtype] for dtype in dtypes])
    return {f"memory_mib_{dtype}": one for dtype, one in zip(dtypes, found, strict=True)}


def _interpreter(cell: Cell, tiny: TestBed, effort: Effort) -> float | None:
    """Seconds of the same step where there is next to nothing to compute; without attention, whose
    keys and values of so many positions come from memory even there."""
    if cell.phase != "decode":
        return None
    tiny.stage(cell.rows, cell.context + 1, cell.context)
    step = tiny.step(tiny.mix(cell.rows, 0))
    found = interleaved({"": step}, rounds=effort.rounds, warm=True, budget=effort.budget)[""]
    return found.median * (1 - _shares(step, effort.profiled)[ATTENTION])


def _shares(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Share of a step's time that each part takes, over so many steps."""
    with clocked() as spent:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        whole = time.perf_counter() - started
    return {part: spent[part] / whole for part in PARTS}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rounded(values: Sequence[float]) -> float | None:
    mean = geometric_mean(list(values))
    return None if mean is None else round(mean, 4)

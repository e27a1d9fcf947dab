"""The step benchmark: one decode or prefill step of a mid-size model against the roofline.

For each step it measures the time with several numbers of adapters, the time without recordings,
the shares of its parts, and the share of Python. Once per type it measures the slow-down by a busy
core. The roofline of a quantized type counts the bytes of its
quantized weights.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

from rich.console import RenderableType

from benchmarks import frame, llava
from benchmarks.frame import Row, ThreadedBenchmark, matching, mean_of
from benchmarks.machine import DTYPES, Rates, interleaved, medians, noises, timed_with_rates
from benchmarks.models import MODEL_TYPES, ChunkWork, SyntheticModel, Work, step_work
from vlora.atmm import op
from vlora.atmm.search.timing import Timing
from vlora.kernels import ops
from vlora.model import step_recordings
from vlora.model.attention import AttentionPlan

READ_BYTES, MULTIPLY_ROUNDS = 256 << 20, 2_000_000
SPARE_POSITIONS = 64
"""Number of positions in the pages beyond those that the cells need."""
TYPICAL_ROWS, TYPICAL_CONTEXT = 16, 256
"""Numbers of rows and of positions before them of the typical decode step. The summary's figures
`elsewhere`, `repeated` and `python` are means over the decode steps with TYPICAL_ROWS rows."""
QUICK, FULL = (5, 0.3), (7, 4.0)
"""Number of rounds, in which each candidate is measured once, and seconds per candidate."""
EACH_CALL = "each call"
PRODUCTS, ATTENTION, LORA = "products", "attention", "lora"
PARTS = (PRODUCTS, ATTENTION, LORA)
TIMED_FUNCTIONS: tuple[tuple[object, str, str], ...] = (
    (ops.Matrix, "__call__", PRODUCTS),
    (ops.Matrix, "gated", PRODUCTS),
    (AttentionPlan, "attend", ATTENTION),
    (op, "apply", LORA),
    (op, "bind_epilogue", LORA),
)
"""Timed functions as (owner, name, part). If one returns a `partial`, calls of the partial are
timed, too. The time of a timed function within another counts for the inner function's part."""
SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile 1: 0"


@dataclass(frozen=True)
class StepCell:
    """One kind of step.

    phase: "decode" (`rows` requests with `context` positions each) or "prefill" (`rows` rows of
        one prompt, or of as many prompts as there are adapters).
    adapters: the numbers of adapters to measure with. With n adapters, request i uses adapter i
        modulo n.
    dtype: key of MODEL_TYPES.
    """

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
        """Return the number of requests in the step for this number of adapters."""
        return self.rows if self.phase == "decode" else max(1, adapters)

    def length(self, adapters: int) -> int:
        """Return the number of tokens that each request has after the step."""
        decode = self.phase == "decode"
        return self.context + 1 if decode else self.rows // self.requests(adapters)

    @property
    def positions(self) -> int:
        """Number of positions that the pages must hold."""
        return self.requests(0) * (self.length(0) + 16)

    def work(self, adapters: int) -> Work:
        """Return the work of the step for this number of adapters."""
        count = 1 if self.phase == "decode" else self.length(adapters)
        chunks = [
            ChunkWork(count, self.context, i % adapters if adapters else None)
            for i in range(self.requests(adapters))
        ]
        stored = MODEL_TYPES[self.dtype]
        return step_work(chunks, llava.MODELS[self.model], stored.itemsize, stored.form)


@dataclass(kw_only=True)
class Step(ThreadedBenchmark):
    """Steps of a mid-size model. A cell of the run is all steps of one model and storage type."""

    name = "step"
    title = "fraction of the roofline by phase and type, and other figures of a step"
    bars: ClassVar = {
        **{f"{phase}_{t}": "≥ 0.7" for phase in ("decode", "prefill") for t in DTYPES},
        **{
            f"decode_{kind}_{rows}": "≥ 0.65"
            for kind in MODEL_TYPES
            if kind not in DTYPES
            for rows in (1, 4, 16)
        },
        "lora_cost_1": "≤ 1.05",
        "lora_cost_16_over_bytes": "≤ 1.1",
        "elsewhere": "≤ 0.08",
        "repeated": "≤ 1",
        "python": "≤ 0.03",
        "busy_neighbour": "≤ 2.3",
    }

    dtypes: frame.Types = "fp32,bf16"
    device: frame.Device = "cpu"

    def prepare(self) -> None:
        super().prepare()
        types = frame.parse_types(self.dtypes, MODEL_TYPES)
        self._cells = grid_cells(self.values, types, quick=self.quick)
        self._on_gpu = self.device != "cpu"
        self._rounds, self._budget = QUICK if self.quick else FULL
        self._slowest: float | None = None

    def cells(self) -> Sequence[list[StepCell]]:
        groups = itertools.groupby(self._cells, key=lambda cell: (cell.model, cell.dtype))
        return [list(cells) for _, cells in groups]

    def measure(self, cell: list[StepCell]) -> Iterator[Row]:
        first = cell[0]
        self.status(f"loading {first.model}, {first.dtype}")
        checkpoint = self.generated(first.model)
        typical = replace(first, phase="decode", rows=TYPICAL_ROWS, context=TYPICAL_CONTEXT)
        # The roofline of a GPU is measured before the model takes its memory.
        self.roofline(self.threads)
        model = model_for([*cell, typical], checkpoint, first.dtype, self.device)
        if self._on_gpu:
            for step_cell in cell:
                self.status(step_cell.name)
                yield self._measure_step(step_cell, model, None)
            return
        tiny = model_for(cell, llava.make(llava.tiny(checkpoint.sizes), self.root), first.dtype)
        for step_cell in cell:
            self.status(step_cell.name)
            yield self._measure_step(step_cell, model, tiny)
        if first.model == self._cells[0].model:
            self.status("a busy core")
            self._slowest = max(self._slowest or 0.0, self._slow_down(typical, model))

    def _measure_step(
        self, cell: StepCell, model: SyntheticModel, tiny: SyntheticModel | None
    ) -> Row:
        """Measure the step for each number of adapters, interleaved if the requests are as many."""
        roofline = self.roofline(self.threads)
        peak_type = roofline.fastest_type(MODEL_TYPES[cell.dtype].dtype)
        timings: dict[str, Timing] = {}
        shares: dict[str, Mapping[str, float]] = {}
        rates = Rates()
        for requests, numbers in itertools.groupby(cell.adapters, key=cell.requests):
            group = list(numbers)
            model.stage(requests, cell.length(group[0]), cell.context)
            steps = {str(n): model.step(model.mix(requests, n)) for n in group}
            if self._on_gpu:  # The first step on a GPU compiles kernels and captures a graph.
                timings |= interleaved(steps, rounds=self._rounds, warm=True, budget=self._budget)
                continue
            calls = dict(steps)
            if cell.phase == "decode" and 0 in group:
                calls[EACH_CALL] = step_recordings.disabled()(steps["0"])
            options = {"rounds": self._rounds, "warm": False, "budget": self._budget}
            timed, own = timed_with_rates(calls, peak_type, MULTIPLY_ROUNDS, READ_BYTES, **options)
            timings |= timed
            rates = Rates(rates.reads + own.reads, rates.peaks + own.peaks)
            shares |= {n: shares_of(step, 1 if self.quick else 3) for n, step in steps.items()}
        rate = rates.read or roofline.bandwidth(READ_BYTES, cold=True)
        peak = rates.peak or roofline.peak(peak_type)
        python = None if tiny is None else self._interpreter_seconds(cell, tiny)
        return row_of(cell, timings, shares, rate, peak, python)

    def _interpreter_seconds(self, cell: StepCell, tiny: SyntheticModel) -> float | None:
        """Return the seconds of a decode step in a model with minimal matrices; None for prefill.

        Attention is excluded, because it reads as many keys and values as in any other model.
        """
        if cell.phase != "decode":
            return None
        tiny.stage(cell.rows, cell.context + 1, cell.context)
        step = tiny.step(tiny.mix(cell.rows, 0))
        options = {"rounds": self._rounds, "budget": self._budget}
        timing = interleaved({"": step}, warm=True, **options)[""]  # type: ignore[arg-type]
        # The share is of a step that makes each call from Python, so it is a little too small.
        return timing.median * (1 - shares_of(step, 1 if self.quick else 3)[ATTENTION])

    def _slow_down(self, typical: StepCell, model: SyntheticModel) -> float:
        """Return the slow-down of the typical step while another process uses one of its cores."""
        model.stage(typical.rows, typical.length(0), typical.context)
        step = model.step(model.mix(typical.rows, 0))
        with spinning_process(max(os.sched_getaffinity(0))) as resumed:
            calls = {"undisturbed": step, "disturbed": resumed()(step)}
            timed = interleaved(calls, rounds=self._rounds, warm=False, budget=self._budget)
        return timed["disturbed"].median / timed["undisturbed"].median

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows) | {"busy_neighbour": self._slowest}

    def tables(self) -> Iterable[RenderableType]:
        adapters = sorted({int(n) for row in self.rows for n in row["ms"]})
        keys = ["cell limit_ms.0", *(f"ms.{n}" for n in adapters), "roofline each_call_ms"]
        keys += [*(f"shares.0.{part}" for part in PARTS), "python noise.0"]
        title = (
            "one step; the limit, limit/time and shares are the base model's; the shares are of a"
            " step that makes each kernel call from Python"
        )
        yield frame.table(title, self.rows, " ".join(keys))


def grid_cells(grid: Mapping[str, Any], dtypes: Sequence[str], *, quick: bool) -> list[StepCell]:
    """Return the cells of a grid, sorted by model and type to load each engine only once."""
    cells = []
    for group in grid["groups"]:
        chosen = group | (group["quick"] if quick else {})
        lists = (chosen["models"], dtypes, chosen["contexts"], chosen["rows"])
        cells += [
            StepCell(chosen["phase"], model, rows, context, tuple(chosen["adapters"]), dtype)
            for model, dtype, context, rows in itertools.product(*lists)
        ]
    models, types = list(llava.MODELS), list(MODEL_TYPES)
    return sorted(cells, key=lambda cell: (models.index(cell.model), types.index(cell.dtype)))


def model_for(
    cells: Sequence[StepCell], checkpoint: llava.Checkpoint, dtype: str, device: str = "cpu"
) -> SyntheticModel:
    """Return a model whose page pool and step size are large enough for all the cells."""
    positions = max(cell.positions for cell in cells) + SPARE_POSITIONS
    return SyntheticModel(
        checkpoint, dtype, positions, max(cell.rows for cell in cells), device=device
    )


def row_of(
    cell: StepCell,
    timings: Mapping[str, Timing],
    shares: Mapping[str, Mapping[str, float]],
    rate: float,
    peak: float,
    interpreter: float | None,
) -> Row:
    """Return the row of a step.

    shares: share of a step's time by part and number of adapters, where each kernel call is made
        from Python; empty on a GPU.
    rate, peak: bytes/s read from memory and flop/s of multiplications in the same rounds.
    interpreter: seconds that Python takes, None if not measured.
    """
    timed = {n: timing for n, timing in timings.items() if n != EACH_CALL}
    seconds = {n: timing.median for n, timing in timed.items()}
    works = {n: cell.work(int(n)) for n in timed}
    limits = {n: work.seconds(peak, rate) for n, work in works.items()}
    each_call = timings[EACH_CALL].median if EACH_CALL in timings else None
    return {
        "phase": cell.phase,
        "model": cell.model,
        "dtype": cell.dtype,
        "rows": cell.rows,
        "context": cell.context,
        "cell": cell.name,
        "ms": medians(timed, 1e3),
        "limit_ms": {n: limit * 1e3 for n, limit in limits.items()},
        "roofline": limits["0"] / seconds["0"],
        "cost": {n: own / seconds["0"] for n, own in seconds.items()},
        "cost_by_bytes": {n: work.moved / works["0"].moved for n, work in works.items()},
        "noise": noises(timed),
        "shares": shares,
        "each_call_ms": each_call and each_call * 1e3,
        "repeated": each_call and seconds["0"] / each_call,
        "python": interpreter and interpreter / seconds["0"],
        "gflops": peak / 1e9,
        "gb_per_s": rate / 1e9,
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return geometric means over cells, with None for kinds of cells that were not measured.

    Quantized types have keys only if they were measured.
    """
    decode = matching(rows, phase="decode")
    summary: dict[str, Any] = {}
    for phase, dtype in itertools.product(("decode", "prefill"), DTYPES):
        chosen = matching(rows, phase=phase, dtype=dtype)
        summary[f"{phase}_{dtype}"] = mean_of(row["roofline"] for row in chosen)
    quantized = dict.fromkeys(row["dtype"] for row in decode if row["dtype"] not in DTYPES)
    for dtype, count in itertools.product(quantized, (1, 4, 16)):
        chosen = matching(decode, dtype=dtype, rows=count)
        summary[f"decode_{dtype}_{count}"] = mean_of(row["roofline"] for row in chosen)
    for n in ("1", "16"):
        costs = [(row["cost"][n], row["cost_by_bytes"][n]) for row in decode if n in row["cost"]]
        summary[f"lora_cost_{n}"] = mean_of(cost for cost, _ in costs)
        summary[f"lora_cost_{n}_over_bytes"] = mean_of(a / b for a, b in costs)
    typical = matching(decode, rows=TYPICAL_ROWS)
    summary["elsewhere"] = mean_of(map(elsewhere, typical))
    for key in ("repeated", "python"):
        summary[key] = mean_of(row[key] for row in typical)
    return summary


def elsewhere(row: Row) -> float | None:
    """Return the share of the base model's step outside its parts; None if they were not timed."""
    return 1.0 - sum(row["shares"]["0"].values()) if row["shares"] else None


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Yield the seconds that one thread spends in each part while the context is open.

    The functions are wrapped only here, so that serving contains no timers.
    """
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            spent_before = sum(spent.values())
            started = time.perf_counter()
            try:
                result = function(*args, **options)
            finally:
                seconds = time.perf_counter() - started
                spent[part] += seconds - (sum(spent.values()) - spent_before)
            return timed(result, part) if isinstance(result, partial) else result

        return call

    with ExitStack() as stack:
        # Repeated calls of a recording do not pass through the timed functions.
        stack.enter_context(step_recordings.disabled())
        for owner, name, part in TIMED_FUNCTIONS:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield spent


def shares_of(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Return the share of the step's time that each part takes, measured over `steps` steps."""
    with timed_parts() as spent:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        total = time.perf_counter() - started
    return {part: spent[part] / total for part in PARTS}


@contextmanager
def spinning_process(core: int) -> Iterator[Callable[[], Any]]:
    """Start a spinning process on `core` and pause it.

    Yield a function that returns a context and decorator. The process runs while it is open.
    """
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(core)], stdout=subprocess.PIPE)

    @contextmanager
    def resumed() -> Iterator[None]:
        process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGSTOP)

    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        yield resumed
    finally:
        process.kill()
        process.communicate()

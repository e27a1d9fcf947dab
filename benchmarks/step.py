"""The step benchmark: one decode or prefill step of a mid-size model against the roofline.

For each step it measures the time with several numbers of adapters, the time without recordings,
the shares of its parts, and the share of Python. Once per type it measures the slow-down by a busy
core, and the memory of the weights. The roofline of a quantized type counts the bytes of its
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
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from rich.console import RenderableType

from benchmarks import frame, llava
from benchmarks.frame import Bar, Row, ThreadedBenchmark, at_least, at_most, percent
from benchmarks.machine import (
    DTYPES,
    Rates,
    timed_with_rates,
)
from benchmarks.models import MODEL_TYPES, ChunkWork, SyntheticModel, Work, step_work
from benchmarks.timing import interleaved, rounded_mean
from vlora.atmm import op
from vlora.atmm.search.timing import Timing
from vlora.kernels import ops
from vlora.model import step_recordings
from vlora.model.attention import AttentionPlan
from vlora.model.decoder_config import load_config
from vlora.model.loader import load_weights

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
    bars: ClassVar[Mapping[str, Bar]] = {
        **{f"{phase}_{t}": at_least(0.7) for phase in ("decode", "prefill") for t in DTYPES},
        **{
            f"decode_{kind}_{rows}": at_least(0.65)
            for kind in MODEL_TYPES
            if kind not in DTYPES
            for rows in (1, 4, 16)
        },
        "lora_cost_1": at_most(1.05),
        "lora_cost_16_over_bytes": at_most(1.1),
        "elsewhere": at_most(0.08),
        "repeated": at_most(1.0),
        "python": at_most(0.03),
        "busy_neighbour": at_most(2.3),
    }

    dtypes: frame.Types = "fp32,bf16"
    device: frame.Device = "cpu"
    root: frame.Root = None

    def prepare(self) -> None:
        super().prepare()
        types = frame.parse_types(self.dtypes, MODEL_TYPES)
        self._cells = grid_cells(self.values, types, quick=self.quick)
        self._on_gpu = self.device != "cpu"
        self._rounds, self._budget = QUICK if self.quick else FULL
        self._others: dict[str, Any] = {"busy_neighbour": None}
        """Figures of the summary that are not in the rows."""

    def cells(self) -> Sequence[list[StepCell]]:
        groups = itertools.groupby(self._cells, key=lambda cell: (cell.model, cell.dtype))
        return [list(cells) for _, cells in groups]

    def measure(self, cell: list[StepCell]) -> Iterator[Row]:
        first = cell[0]
        self.status(f"loading {first.model}, {first.dtype}")
        checkpoint = llava.make(llava.MODELS[first.model], self.root)
        typical = replace(first, phase="decode", rows=TYPICAL_ROWS, context=TYPICAL_CONTEXT)
        # The roofline of a GPU is measured before the model takes its memory.
        self.roofline(self.threads)
        model = model_for([*cell, typical], checkpoint, first.dtype, self.device)
        tiny: SyntheticModel | None = None
        if not self._on_gpu:
            tiny = model_for(cell, llava.make(llava.tiny(checkpoint.sizes), self.root), first.dtype)
        for step_cell in cell:
            self.status(step_cell.name)
            yield self._measure_step(step_cell, model, tiny)
        if self._on_gpu:
            return
        if first.model == self._cells[0].model:
            self.status("a busy core")
            known = self._others["busy_neighbour"] or 0.0
            self._others["busy_neighbour"] = max(known, self._slow_down(typical, model))
            self.status("memory")
            weights = {"weights": weights_mib(checkpoint.folder, first.dtype)}
            self._others[f"memory_mib_{first.dtype}"] = weights

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
        roofline.remeasure_if_due()
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
        return round(timed["disturbed"].median / timed["undisturbed"].median, 3)

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows) | self._others

    def tables(self) -> Iterable[RenderableType]:
        adapters = sorted({int(n) for row in self.rows for n in row["ms"] if n != EACH_CALL})
        columns: dict[str, Any] = {"step": "cell", "limit ms": lambda row: row["limit_ms"]["0"]}
        for n in map(str, adapters):
            columns[f"{n} adapters ms"] = lambda row, n=n: row["ms"].get(n)
        columns |= {"limit/time": "roofline", "each call ms": "each_call_ms"}
        for part in PARTS:
            columns[part] = lambda row, part=part: percent(row["shares"].get("0", {}).get(part))
        columns["rest"] = lambda row: percent(elsewhere(row))
        columns["python"] = lambda row: percent(row["python"], 1)
        columns["noise"] = lambda row: f"±{row['noise']['0']:.0%}"
        yield frame.table(
            "one step; the limit, limit/time and shares are the base model's; the shares are of a"
            " step that makes each kernel call from Python",
            self.rows,
            columns,
        )


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
    adapters = [n for n in timings if n != EACH_CALL]
    seconds = {n: timings[n].median for n in timings}
    limits = {n: cell.work(int(n)).seconds(peak, rate) for n in adapters}
    each_call = seconds.get(EACH_CALL)
    base = cell.work(0).moved
    return {
        "phase": cell.phase,
        "model": cell.model,
        "dtype": cell.dtype,
        "rows": cell.rows,
        "context": cell.context,
        "cell": cell.name,
        "ms": {n: round(seconds[n] * 1e3, 2) for n in adapters},
        "limit_ms": {n: round(limits[n] * 1e3, 2) for n in adapters},
        "roofline": round(limits["0"] / seconds["0"], 4),
        "cost": {n: round(seconds[n] / seconds["0"], 4) for n in adapters},
        "cost_by_bytes": {n: round(cell.work(int(n)).moved / base, 4) for n in adapters},
        "noise": {n: round(timings[n].noise, 3) for n in adapters},
        "shares": {n: {part: round(s, 4) for part, s in own.items()} for n, own in shares.items()},
        "each_call_ms": each_call and round(each_call * 1e3, 2),
        "repeated": each_call and round(seconds["0"] / each_call, 4),
        "python": interpreter and round(interpreter / seconds["0"], 4),
        "gflops": round(peak / 1e9, 1),
        "gb_per_s": round(rate / 1e9, 1),
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return geometric means over cells, with None for kinds of cells that were not measured.

    Quantized types have keys only if they were measured.
    """
    decode = [row for row in rows if row["phase"] == "decode"]
    summary: dict[str, Any] = {}
    for phase, dtype in itertools.product(("decode", "prefill"), DTYPES):
        chosen = [row for row in rows if (row["phase"], row["dtype"]) == (phase, dtype)]
        summary[f"{phase}_{dtype}"] = rounded_mean((row["roofline"] for row in chosen), 4)
    quantized = dict.fromkeys(row["dtype"] for row in decode if row["dtype"] not in DTYPES)
    for dtype, rows_in_step in itertools.product(quantized, (1, 4, 16)):
        chosen = [row for row in decode if (row["dtype"], row["rows"]) == (dtype, rows_in_step)]
        shares = (row["roofline"] for row in chosen)
        summary[f"decode_{dtype}_{rows_in_step}"] = rounded_mean(shares, 4)
    for n in ("1", "16"):
        costs = [(row["cost"][n], row["cost_by_bytes"][n]) for row in decode if n in row["cost"]]
        summary[f"lora_cost_{n}"] = rounded_mean((cost for cost, _ in costs), 4)
        summary[f"lora_cost_{n}_over_bytes"] = rounded_mean((a / b for a, b in costs), 4)
    typical = [row for row in decode if row["rows"] == TYPICAL_ROWS]
    summary["elsewhere"] = rounded_mean(map(elsewhere, typical), 4)
    for key in ("repeated", "python"):
        summary[key] = rounded_mean((row[key] for row in typical), 4)
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


def weights_mib(folder: Path, dtype: str) -> int:
    """Return the MiB that the weights of a checkpoint take in one type of MODEL_TYPES."""
    chosen = MODEL_TYPES[dtype]
    weights = load_weights(folder, load_config(folder), DTYPES[chosen.dtype], chosen.form)
    parts = [weights.slab, weights.embedding, weights.lm_head, weights.final_norm]
    parts += [*weights.norms.values(), *weights.biases.values()]
    return sum({id(part): part.nbytes for part in parts}.values()) >> 20

"""Measurement of one engine step: its time, its parts and its roofline."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import llava
from benchmarks.dtypes import DTYPES, MODEL_TYPES
from benchmarks.machine import ConcurrentRates
from benchmarks.roofline import Roofline
from benchmarks.step.footprint import footprints
from benchmarks.step.parts import ATTENTION, PARTS, timed_parts
from benchmarks.synthetic_model import SyntheticModel
from benchmarks.timing import interleaved, rounded_mean
from benchmarks.work_model import ChunkWork, Work, step_work
from vlora.atmm.search.timing import Timing
from vlora.model import step_recordings

READ_BYTES = 256 << 20
MULTIPLY_ROUNDS = 2_000_000
"""Iterations of the peak microbenchmark, which measures the speed of the cores in each round."""
SPARE_POSITIONS = 64
"""Number of positions in the pages beyond those that the cells need."""
EACH_CALL = "each call"
QUANTIZED_ROWS = (1, 4, 16)
"""Numbers of rows for which the summary has a figure of each quantized type."""
TYPICAL_ROWS, TYPICAL_CONTEXT = 16, 256
"""Numbers of rows and of positions before them of the typical decode step. The summary's figures
`elsewhere` and `python` are means over the decode steps with TYPICAL_ROWS rows.
"""


@dataclass(frozen=True)
class Effort:
    """Settings that decide how long a measurement takes.

    rounds: number of rounds. In a round, each candidate of a cell is measured once.
    budget: seconds per candidate.
    profiled: number of steps whose parts are timed.
    """

    rounds: int
    budget: float
    profiled: int


QUICK = Effort(rounds=5, budget=0.3, profiled=1)
FULL = Effort(rounds=7, budget=4.0, profiled=3)


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
        if self.phase == "decode":
            return self.context + 1
        return self.rows // self.requests(adapters)

    @property
    def positions(self) -> int:
        """Number of positions that the pages must hold."""
        return self.requests(0) * (self.length(0) + 16)

    def work(self, adapters: int) -> Work:
        """Return the work of the step for this number of adapters."""
        requests, sizes = self.requests(adapters), llava.MODELS[self.model]
        count = 1 if self.phase == "decode" else self.length(adapters)
        chunks = [
            ChunkWork(count, self.context, i % adapters if adapters else None)
            for i in range(requests)
        ]
        stored = MODEL_TYPES[self.dtype]
        return step_work(chunks, sizes, stored.itemsize, stored.form)


@dataclass(frozen=True)
class StepResult:
    """Figures of one cell by number of adapters, and the machine's rates in the same rounds.

    each_call: time of a decode step without adapters that makes each kernel call from Python,
        instead of repeating a recording (`model.step_recordings`); None for other steps.
    shares: share of such a step's time by part, for each number of adapters; empty on a GPU.
    rate: bytes/s read from memory.
    peak: flop/s of multiplications.
    interpreter: seconds of the same step in a model with minimal matrices, without its attention;
        None if not measured.
    """

    cell: StepCell
    timings: Mapping[int, Timing]
    each_call: Timing | None
    shares: Mapping[int, Mapping[str, float]]
    rate: float
    peak: float
    interpreter: float | None = None

    def limit(self, adapters: int) -> float:
        """Return the roofline of the step in seconds."""
        return self.cell.work(adapters).seconds(self.peak, self.rate)

    def share_of_limit(self, adapters: int = 0) -> float:
        """Return the fraction of the roofline: the roofline divided by the measured time."""
        return self.limit(adapters) / self.timings[adapters].median

    def cost(self, adapters: int) -> float:
        """Return the step's time with this number of adapters, divided by its time without any."""
        return self.timings[adapters].median / self.timings[0].median

    def cost_by_bytes(self, adapters: int) -> float:
        """Return the prediction of `cost` from the numbers of bytes read and written alone."""
        return self.cell.work(adapters).moved / self.cell.work(0).moved

    @property
    def repeated(self) -> float | None:
        """Time of the step without adapters, divided by `each_call`; None if not measured."""
        return None if self.each_call is None else self.timings[0].median / self.each_call.median

    @property
    def elsewhere(self) -> float | None:
        """Share of the base model's step outside matrix products, attention and LoRA; None if the
        parts were not timed.
        """
        return 1.0 - sum(self.shares[0].values()) if self.shares else None

    @property
    def python(self) -> float | None:
        """`interpreter` divided by the time of the step without adapters; None if not measured."""
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
            "each_call_ms": None
            if self.each_call is None
            else round(self.each_call.median * 1e3, 2),
            "python": None if self.python is None else round(self.python, 4),
            "gflops": round(self.peak / 1e9, 1),
            "gb_per_s": round(self.rate / 1e9, 1),
        }


def load_grid(
    path: Path, dtypes: Sequence[str], models: Sequence[str] | None, *, quick: bool
) -> list[StepCell]:
    """Return the cells of a grid file, sorted by model and type to load each engine only once."""
    cells = []
    for group in json.loads(path.read_text())["groups"]:
        chosen = group | (group["quick"] if quick else {})
        for model, dtype, context, rows in itertools.product(
            chosen["models"], dtypes, chosen["contexts"], chosen["rows"]
        ):
            if models is None or model in models:
                adapters = tuple(chosen["adapters"])
                cells.append(StepCell(chosen["phase"], model, rows, context, adapters, dtype))
    models_order, types_order = list(llava.MODELS), list(MODEL_TYPES)
    return sorted(
        cells, key=lambda cell: (models_order.index(cell.model), types_order.index(cell.dtype))
    )


def model_for(
    cells: Sequence[StepCell], checkpoint: llava.Checkpoint, dtype: str, device: str = "cpu"
) -> SyntheticModel:
    """Return a model whose page pool and step size are large enough for all the cells."""
    positions = max(cell.positions for cell in cells) + SPARE_POSITIONS
    max_rows = max(cell.rows for cell in cells)
    return SyntheticModel(checkpoint, dtype, positions, max_rows, adapters=True, device=device)


def measure(
    cell: StepCell,
    model: SyntheticModel,
    effort: Effort,
    roofline: Roofline,
    *,
    on_gpu: bool = False,
) -> StepResult:
    """Measure the step for each number of adapters.

    Steps with the same number of requests are interleaved.

    on_gpu: whether a GPU computes the steps, whose parts are then not timed.
    """
    peak_type = max(("fp32", MODEL_TYPES[cell.dtype].dtype), key=roofline.peak)
    concurrent = ConcurrentRates(peak_type, MULTIPLY_ROUNDS, READ_BYTES)
    timings: dict[int, Timing] = {}
    each_call: Timing | None = None
    shares: dict[int, Mapping[str, float]] = {}
    rates: list[tuple[float | None, float | None]] = []
    for requests, numbers in itertools.groupby(cell.adapters, key=cell.requests):
        group = list(numbers)
        model.stage(requests, cell.length(group[0]), cell.context)
        steps = {str(n): model.step(model.mix(requests, n)) for n in group}
        others = {} if on_gpu else concurrent.calls()
        if cell.phase == "decode" and 0 in group and not on_gpu:
            others[EACH_CALL] = step_recordings.disabled()(steps["0"])
        group_timings = interleaved(
            steps | others,
            rounds=effort.rounds,
            # The first step on a GPU compiles kernels and captures a graph.
            warm=on_gpu,
            budget=effort.budget,
        )
        rates.append(concurrent.rates(group_timings))
        timings |= {n: group_timings[str(n)] for n in group}
        each_call = group_timings.get(EACH_CALL, each_call)
        if not on_gpu:
            shares |= {n: _shares(steps[str(n)], effort.profiled) for n in group}
    roofline.remeasure_if_due()
    read, peak = (_mean(values) for values in zip(*rates, strict=True))
    return StepResult(
        cell,
        timings,
        each_call,
        shares,
        rate=read or roofline.bandwidth(READ_BYTES, cold=True),
        peak=peak or roofline.peak(peak_type),
    )


def measure_interpreter(cell: StepCell, tiny: SyntheticModel, effort: Effort) -> float | None:
    """Return the seconds of a decode step in a model with minimal matrices, or None for prefill.

    Attention is excluded, because it reads as many keys and values in this model as in any other.
    """
    if cell.phase != "decode":
        return None
    tiny.stage(cell.rows, cell.context + 1, cell.context)
    step = tiny.step(tiny.mix(cell.rows, 0))
    timing = interleaved({"": step}, rounds=effort.rounds, warm=True, budget=effort.budget)[""]
    # The share is of a step that makes each call from Python, so it is a little too small.
    return timing.median * (1 - _shares(step, effort.profiled)[ATTENTION])


def summarize(results: Sequence[StepResult]) -> dict[str, Any]:
    """Return geometric means over cells, with None for kinds of cells that were not measured.

    Quantized types have keys only if they were measured.
    """
    summary: dict[str, Any] = {}
    for phase, dtype in itertools.product(("decode", "prefill"), DTYPES):
        chosen = [r for r in results if (r.cell.phase, r.cell.dtype) == (phase, dtype)]
        summary[f"{phase}_{dtype}"] = rounded_mean([r.share_of_limit() for r in chosen], 4)
    decode = [r for r in results if r.cell.phase == "decode"]
    quantized = dict.fromkeys(r.cell.dtype for r in decode if r.cell.dtype not in DTYPES)
    for dtype, rows in itertools.product(quantized, QUANTIZED_ROWS):
        chosen = [r for r in decode if (r.cell.dtype, r.cell.rows) == (dtype, rows)]
        summary[f"decode_{dtype}_{rows}"] = rounded_mean([r.share_of_limit() for r in chosen], 4)
    for n in (1, 16):
        chosen = [r for r in decode if n in r.timings]
        summary[f"lora_cost_{n}"] = rounded_mean([r.cost(n) for r in chosen], 4)
        by_bytes = [r.cost(n) / r.cost_by_bytes(n) for r in chosen]
        summary[f"lora_cost_{n}_over_bytes"] = rounded_mean(by_bytes, 4)
    typical = [r for r in decode if r.cell.rows == TYPICAL_ROWS]
    summary["elsewhere"] = rounded_mean(
        [r.elsewhere for r in typical if r.elsewhere is not None], 4
    )
    summary["repeated"] = rounded_mean([r.repeated for r in typical if r.repeated is not None], 4)
    summary["python"] = rounded_mean([r.python for r in typical if r.python is not None], 4)
    return summary


def measure_memory(cells: Sequence[StepCell], root: Path | None = None) -> dict[str, Any]:
    """Return the memory in MiB of the grid's first model, as one summary key per storage type."""
    dtypes = sorted({cell.dtype for cell in cells}, reverse=True)
    folder = llava.make(llava.MODELS[cells[0].model], root).folder
    sizes = footprints(folder, dtypes)
    return {f"memory_mib_{dtype}": size for dtype, size in zip(dtypes, sizes, strict=True)}


def _shares(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Return the share of the step's time that each part takes, measured over `steps` steps."""
    with timed_parts() as spent:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        total = time.perf_counter() - started
    return {part: spent[part] / total for part in PARTS}


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None

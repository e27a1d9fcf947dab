"""Measurements of attention over KV pages, one cell of the grid at a time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.dtypes import DTYPES
from benchmarks.machine import ConcurrentRates, without_rates
from benchmarks.roofline import Roofline
from benchmarks.synthetic_model import fill_with_random
from benchmarks.timing import interleaved, rounded_mean
from vlora.atmm.cpu import Cpu
from vlora.atmm.search.timing import Timing
from vlora.backends import Backend
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.inputs import text_prompt
from vlora.model.rotary import Rotary

KERNEL, TWIN = "kernel", "twin"
COLD_BYTES = Cpu.here().cold_bytes
"""Minimum size in bytes of the keys and values of all layers. The layers are read in turn, so that
each should have left the caches before its next use.
"""
READ_BYTES = 64 << 20
"""Number of bytes that the bandwidth microbenchmark reads in each round."""
MULTIPLY_ROUNDS = 1_000_000
"""Number of iterations of the peak microbenchmark in each round."""
MIXED_DECODES = 8
"""Number of decoding requests that a mixed step has in addition to its chunk."""
GROUP_KEYS = {"phase", "heads", "rows", "contexts", "quick"}


@dataclass(frozen=True)
class AttentionCell:
    """One attention step.

    phase: "decode": `rows` requests of one row, each after `context` positions.
        "prefill": one chunk of `rows` rows after `context` positions (0 in the committed grid).
        "mixed": one chunk of `rows` rows and MIXED_DECODES decoding requests, each after `context`
        positions.
    name_of_heads: key of the grid's entry with the numbers of query heads and KV heads.
    dim: width of a head.
    block: number of positions per page.
    """

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
        """Number of rows of each chunk, and number of positions before them."""
        if self.phase == "decode":
            return ((1, self.context),) * self.rows
        chunk = ((self.rows, self.context),)
        return chunk + ((1, self.context),) * MIXED_DECODES if self.phase == "mixed" else chunk

    @property
    def kv_bytes(self) -> int:
        """Number of bytes of one layer's keys and values that a call reads."""
        positions = sum(rows + start for rows, start in self.chunks)
        return 2 * positions * self.kv_heads * self.dim * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products. Masked positions do not count."""
        pairs = sum(rows * start + rows * (rows + 1) // 2 for rows, start in self.chunks)
        return 4 * pairs * self.heads * self.dim


@dataclass(frozen=True)
class Effort:
    """Settings that decide how long a measurement takes.

    rounds: number of rounds. In a round, each candidate of a cell is measured once.
    budget: seconds per candidate in a cell.
    """

    rounds: int
    budget: float


QUICK, FULL = Effort(5, 0.15), Effort(9, 1.0)


@dataclass(frozen=True)
class AttentionResult:
    """Timings of one cell, and the rates of the machine in the same rounds.

    rate: rate of reading from memory in bytes/s.
    peak: rate of multiplying in flop/s.
    """

    cell: AttentionCell
    timings: Mapping[str, Timing]
    rate: float
    peak: float

    @property
    def limit(self) -> float:
        """Roofline of the work in seconds."""
        return max(self.cell.kv_bytes / self.rate, self.cell.flops / self.peak)

    @property
    def vs_twin(self) -> float:
        """Time of torch's attention divided by the time of the kernel."""
        return self.timings[TWIN].median / self.timings[KERNEL].median

    @property
    def share_of_limit(self) -> float:
        """Fraction of the roofline: the roofline divided by the measured time."""
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
            "roofline": round(self.share_of_limit, 3),
        }


def load_grid(path: Path, dtypes: Sequence[str], *, quick: bool) -> list[AttentionCell]:
    """Return all cells of a grid file.

    quick: whether the lists in a group's entry `quick` replace the group's lists of the same names.

    Raises ValueError for an unknown or missing key.
    """
    grid = json.loads(path.read_text())
    cells = []
    for group in grid["groups"]:
        if set(group) != GROUP_KEYS:
            keys = sorted(set(group) ^ GROUP_KEYS)
            raise ValueError(f"{path.name}: keys {keys} are unknown or missing")
        chosen = group | group["quick"] if quick else group
        for dtype, name, rows, context in itertools.product(
            dtypes, chosen["heads"], chosen["rows"], chosen["contexts"]
        ):
            heads, kv_heads = grid["heads"][name]
            sizes = (heads, kv_heads, grid["dim"], grid["block"])
            cells.append(AttentionCell(group["phase"], name, *sizes, rows, context, dtype))
    return cells


class SyntheticAttention:
    """Chunks of one step, and random keys and values of more layers than the caches hold."""

    def __init__(self, cell: AttentionCell) -> None:
        page_counts = [-(-(rows + start) // cell.block) for rows, start in cell.chunks]
        self.layers = max(2, -(-COLD_BYTES // cell.kv_bytes))
        self.store = KVCache(
            sum(page_counts), self.layers, cell.block, cell.kv_heads, cell.dim, DTYPES[cell.dtype]
        )
        fill_with_random(self.store.cache)
        free_pages = iter(torch.randperm(sum(page_counts)).tolist())
        self.chunks, row = [], 0
        for (rows, start), count in zip(cell.chunks, page_counts, strict=True):
            tokens = (0,) * rows
            pages = tuple(itertools.islice(free_pages, count))
            prompt = text_prompt(tokens)
            self.chunks.append(Chunk(str(row), 0, row, start, tokens, prompt, pages, True))
            row += rows
        self.heads, self.dim = cell.heads, cell.dim
        self.qkv = torch.randn(row, (cell.heads + 2 * cell.kv_heads) * cell.dim)
        # The angles are zero: repeated calls must leave the rows unchanged.
        self.rotary = Rotary.from_angles(torch.zeros(row, cell.dim // 2), 1.0)

    def attend(self, backend: Backend) -> Callable[[], None]:
        """Return a function whose calls compute the attention of one layer after another."""
        plan = AttentionPlan(self.chunks, self.store, self.heads, backend=backend)
        layers = itertools.cycle(range(self.layers))
        out = torch.empty(len(self.qkv), self.heads * self.dim)

        def attend_layer() -> None:
            plan.attend(next(layers), self.qkv, self.rotary, out)

        return attend_layer


@torch.inference_mode()
def measure(cell: AttentionCell, effort: Effort, roofline: Roofline) -> AttentionResult:
    """Measure the kernel and torch's attention on one cell, interleaved."""
    synthetic = SyntheticAttention(cell)
    # The peak of bf16 counts only where it is higher than that of fp32.
    peak_type = max(("fp32", cell.dtype), key=roofline.peak)
    concurrent = ConcurrentRates(peak_type, MULTIPLY_ROUNDS, READ_BYTES)
    timings = interleaved(
        {
            KERNEL: synthetic.attend("cpu"),
            TWIN: synthetic.attend("reference"),
            **concurrent.calls(),
        },
        rounds=effort.rounds,
        warm=False,
        lead=True,
        budget=effort.budget,
    )
    rate, peak = concurrent.rates(timings)
    return AttentionResult(
        cell,
        without_rates(timings),
        rate or roofline.bandwidth(READ_BYTES, cold=True),
        peak or roofline.peak(peak_type),
    )


def summarize(results: Sequence[AttentionResult]) -> dict[str, Any]:
    """Return the smallest speed-up over torch's attention, its cell, and the geometric mean of
    `share_of_limit` over the cells of each phase."""
    worst = min(results, key=lambda result: result.vs_twin)
    summary: dict[str, Any] = {
        "vs_twin_worst": round(worst.vs_twin, 3),
        "vs_twin_worst_cell": worst.cell.name,
    }
    for phase in ("decode", "prefill", "mixed"):
        shares = [r.share_of_limit for r in results if r.cell.phase == phase]
        summary[f"roofline_{phase}"] = rounded_mean(shares)
    return summary

"""The attention benchmark: the kernel for KV pages against torch's attention and the roofline.

Torch's attention (the "twin") gathers the pages first. The layers are read in turn, and their keys
and values together are larger than the caches, as in a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from rich.console import RenderableType

from benchmarks import frame
from benchmarks.frame import Bar, Row, ThreadedBenchmark, at_least
from benchmarks.gpu_timing import discard
from benchmarks.machine import COLD_BYTES, DTYPES, timed_with_rates
from benchmarks.models import fill_with_random
from benchmarks.timing import medians_in, noises, rounded_mean
from vlora.backends import Backend
from vlora.memory.kv_cache import KVCache
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.inputs import text_prompt
from vlora.model.rotary import Rotary

READ_BYTES, MULTIPLY_ROUNDS = 64 << 20, 1_000_000
"""Work of the microbenchmarks in each round."""
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


@dataclass(kw_only=True)
class Attention(ThreadedBenchmark):
    """Attention over KV pages in decode, prefill and mixed steps."""

    name = "attention"
    title = "roofline: fraction of the roofline; vs_twin: time of torch's attention / our time"
    bars: ClassVar[Mapping[str, Bar]] = {
        "vs_twin_worst": at_least(1),
        "roofline_decode": at_least(0.667),
    }

    dtypes: frame.Types = "fp32,bf16"

    def cells(self) -> Sequence[AttentionCell]:
        return grid_cells(self.values, frame.parse_types(self.dtypes), quick=self.quick)

    @torch.inference_mode()
    def measure(self, cell: AttentionCell) -> Iterator[Row]:
        self.status(cell.name)
        step = SyntheticAttention(cell)
        roofline = self.roofline(self.threads)
        peak_type = roofline.fastest_type(cell.dtype)
        timings, rates = timed_with_rates(
            {"kernel": step.attend("cpu"), "twin": step.attend("reference")},
            peak_type,
            MULTIPLY_ROUNDS,
            READ_BYTES,
            rounds=5 if self.quick else 9,
            warm=False,
            lead=True,
            budget=0.15 if self.quick else 1.0,
        )
        rate = rates.read or roofline.bandwidth(READ_BYTES, cold=True)
        peak = rates.peak or roofline.peak(peak_type)
        limit = max(cell.kv_bytes / rate, cell.flops / peak)
        seconds = timings["kernel"].median
        yield {
            "phase": cell.phase,
            "heads": cell.name_of_heads,
            "rows": cell.rows,
            "context": cell.context,
            "dtype": cell.dtype,
            "cell": cell.name,
            "us": medians_in(timings, 1e6, 1),
            "noise": noises(timings),
            "limit_us": round(limit * 1e6, 1),
            "vs_twin": round(timings["twin"].median / seconds, 3),
            "roofline": round(limit / seconds, 3),
        }

    def summarize(self) -> dict[str, Any]:
        worst = min(self.rows, key=lambda row: float(row["vs_twin"]))
        summary = {"vs_twin_worst": worst["vs_twin"], "vs_twin_worst_cell": worst["cell"]}
        for phase in ("decode", "prefill", "mixed"):
            shares = [row["roofline"] for row in self.rows if row["phase"] == phase]
            summary[f"roofline_{phase}"] = rounded_mean(shares)
        return summary

    def tables(self) -> Iterable[RenderableType]:
        columns: dict[str, Any] = {
            "cell": "cell",
            "kernel µs": lambda row: f"{row['us']['kernel']:.0f}",
            "twin µs": lambda row: f"{row['us']['twin']:.0f}",
            "limit µs": "limit_us",
            "twin/kernel": "vs_twin",
            "limit/time": "roofline",
            "noise": lambda row: f"±{row['noise']['kernel']:.0%}",
        }
        yield frame.table("twin: gather the pages, then torch's attention", self.rows, columns)


def grid_cells(
    grid: Mapping[str, Any], dtypes: Sequence[str], *, quick: bool
) -> list[AttentionCell]:
    """Return all cells of a grid. Raises ValueError for an unknown or missing key.

    quick: whether the lists in a group's entry `quick` replace the group's lists of the same names.
    """
    cells = []
    for group in grid["groups"]:
        if set(group) != GROUP_KEYS:
            raise ValueError(f"keys {sorted(set(group) ^ GROUP_KEYS)} are unknown or missing")
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
        return lambda: discard(plan.attend(next(layers), self.qkv, self.rotary, out))

"""The attention benchmark: the kernel for KV pages against torch's attention and the roofline.

Torch's attention (the "twin") gathers the pages first. The layers are read in turn, and their keys
and values together are larger than the caches, as in a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from benchmarks import frame
from benchmarks.frame import Row, ThreadedBenchmark, matching, mean_of
from benchmarks.gpu_device import discard
from benchmarks.machine import COLD_BYTES, DTYPES, medians, noises, timed_with_rates
from benchmarks.models import fill_with_random
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
    bars: ClassVar = {"vs_twin_worst": "≥ 1", "roofline_decode": "≥ 0.667"}
    shown: ClassVar = {
        "twin: gather the pages, then torch's attention": (
            "cell us.kernel us.twin limit_us vs_twin roofline noise.kernel"
        )
    }

    dtypes: frame.Types = "fp32,bf16"

    def cells(self) -> Sequence[AttentionCell]:
        return grid_cells(self.values, frame.parse_types(self.dtypes), quick=self.quick)

    @torch.inference_mode()
    def measure(self, cell: AttentionCell) -> Iterator[Row]:
        self.status(cell.name)
        calls = attention_calls(cell)
        roofline = self.roofline(self.threads)
        peak_type = roofline.fastest_type(cell.dtype)
        rounds, budget = (5, 0.15) if self.quick else (9, 1.0)
        options = {"rounds": rounds, "warm": False, "lead": True, "budget": budget}
        timings, rates = timed_with_rates(calls, peak_type, MULTIPLY_ROUNDS, READ_BYTES, **options)
        moved = ((cell.kv_bytes, True),)
        limit = roofline.seconds(cell.flops, moved, peak_type, rates.read, rates.peak)
        seconds = timings["kernel"].median
        yield {
            **asdict(cell),
            "cell": cell.name,
            "us": medians(timings, 1e6),
            "noise": noises(timings),
            "limit_us": limit * 1e6,
            "vs_twin": timings["twin"].median / seconds,
            "roofline": limit / seconds,
        }

    def summarize(self) -> dict[str, Any]:
        worst = min(self.rows, key=lambda row: float(row["vs_twin"]))
        summary = {"vs_twin_worst": worst["vs_twin"], "vs_twin_worst_cell": worst["cell"]}
        for phase in ("decode", "prefill", "mixed"):
            shares = (row["roofline"] for row in matching(self.rows, phase=phase))
            summary[f"roofline_{phase}"] = mean_of(shares)
        return summary


def grid_cells(
    grid: Mapping[str, Any], dtypes: Sequence[str], *, quick: bool
) -> list[AttentionCell]:
    """Return all cells of a grid.

    quick: whether the lists in a group's entry `quick` replace the group's lists of the same names.
    """
    cells = []
    for group in grid["groups"]:
        chosen = group | group["quick"] if quick else group
        for dtype, name, rows, context in itertools.product(
            dtypes, chosen["heads"], chosen["rows"], chosen["contexts"]
        ):
            heads, kv_heads = grid["heads"][name]
            sizes = (heads, kv_heads, grid["dim"], grid["block"])
            cells.append(AttentionCell(group["phase"], name, *sizes, rows, context, dtype))
    return cells


def attention_calls(cell: AttentionCell) -> dict[str, Callable[[], None]]:
    """Return functions whose calls compute one layer after another, by our kernel and its twin.

    The keys and values are random, and those of all layers are larger than the caches.
    """
    page_counts = [-(-(rows + start) // cell.block) for rows, start in cell.chunks]
    count = max(2, -(-COLD_BYTES // cell.kv_bytes))
    sizes = (cell.block, cell.kv_heads, cell.dim, DTYPES[cell.dtype])
    store = KVCache(sum(page_counts), count, *sizes)
    fill_with_random(store.cache)
    free_pages = iter(torch.randperm(sum(page_counts)).tolist())
    chunks, row = [], 0
    for (rows, start), pages in zip(cell.chunks, page_counts, strict=True):
        tokens = (0,) * rows
        own = tuple(itertools.islice(free_pages, pages))
        chunks.append(Chunk(str(row), 0, row, start, tokens, text_prompt(tokens), own, True))
        row += rows
    qkv = torch.randn(row, (cell.heads + 2 * cell.kv_heads) * cell.dim)
    # The angles are zero: repeated calls must leave the rows unchanged.
    rotary = Rotary.from_angles(torch.zeros(row, cell.dim // 2), 1.0)
    out = torch.empty(row, cell.heads * cell.dim)

    def attend(backend: Backend) -> Callable[[], None]:
        plan = AttentionPlan(chunks, store, cell.heads, backend=backend)
        layers = itertools.cycle(range(count))
        return lambda: discard(plan.attend(next(layers), qkv, rotary, out))

    return {"kernel": attend("cpu"), "twin": attend("reference")}

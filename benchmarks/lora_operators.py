"""Shapes of LoRA calls, and the LoRA operators that the kernels benchmark compares.

Semantics of every operator: for each segment (start, length, slot, +1) with rows R:
y[R] += (x[R] Aᵀ) Bᵀ, where (A, B) is the slot's pair, with the scale folded into B.

Work that a baseline would do once per adapter (stacking, packing) or once per step (sorting,
computing row numbers) is done before the timed calls. The figures favour the baselines.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

import vlora.atmm as atmm_package
from benchmarks.machine import DTYPES, is_compiled
from vlora import native
from vlora.atmm import op, tiles
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment, Segments

LoraCall = Callable[[torch.Tensor, torch.Tensor], None]
"""Function of y and x that adds the LoRA products to y, for fixed adapters and segments."""

MAX_EINSUM_BYTES = 1 << 30
"""Maximum size of the einsum baseline's gathered weights. Larger cells leave it out."""
MIXED_RANKS = (8, 64, 16, 128, 32)
ZIPF_EXPONENT = 1.2


@dataclass(frozen=True)
class KernelCell:
    """One shape: `requests` requests of `rows` rows each.

    regime: "decode" or "prefill".
    width: d_in and d_out, which are equal.
    rank: a number, or "mixed" to cycle through MIXED_RANKS.
    popularity: "identical" (all requests use adapter 0), "distinct" (each request has its own) or
        "zipf" (adapter i has the weight (i+1)^−1.2).
    cold: whether the adapters are read from memory instead of from the caches, as in a model with
        many layers.
    """

    regime: str
    requests: int
    rows: int
    width: int
    rank: int | str
    popularity: str
    cold: bool
    dtype: str

    @property
    def total_rows(self) -> int:
        return self.requests * self.rows

    @property
    def name(self) -> str:
        heat = "cold" if self.cold else "hot"
        return (
            f"{self.requests}×{self.rows} d{self.width} r{self.rank} {self.popularity}"
            f" {heat} {self.dtype}"
        )

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Adapter slot of each request, sorted as in the engine."""
        if self.popularity == "identical":
            return (0,) * self.requests
        if self.popularity == "distinct":
            return tuple(range(self.requests))
        numbers = torch.arange(1, self.requests + 1, dtype=torch.float64, device="cpu")
        weights = numbers**-ZIPF_EXPONENT
        generator = torch.Generator().manual_seed(self.requests)
        drawn = torch.multinomial(weights, self.requests, replacement=True, generator=generator)
        order = {slot: i for i, slot in enumerate(dict.fromkeys(sorted(drawn.tolist())))}
        return tuple(sorted(order[slot] for slot in drawn.tolist()))

    @property
    def adapters(self) -> int:
        return max(self.slots) + 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each adapter that a request uses, by slot."""
        if isinstance(self.rank, int):
            return (self.rank,) * self.adapters
        return tuple(MIXED_RANKS[slot % len(MIXED_RANKS)] for slot in range(self.adapters))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """One segment per adapter, because the engine joins adjacent rows of one adapter."""
        segments, start = [], 0
        for slot, group in itertools.groupby(self.slots):
            length = len(list(group)) * self.rows
            segments.append(Segment(start, length, slot))
            start += length
        return tuple(segments)

    @property
    def flops(self) -> int:
        """Number of floating-point operations of shrink and expand together."""
        ranks = self.ranks
        return sum(4 * self.rows * self.width * ranks[slot] for slot in self.slots)

    @property
    def adapter_bytes(self) -> int:
        return 2 * self.width * sum(self.ranks) * DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes moved for x, which is read, and for y, which is read and written."""
        return 3 * self.total_rows * self.width * DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        return self.adapter_bytes + self.row_bytes

    def draw_pairs(self, generator: torch.Generator) -> list[LoraPair]:
        dtype = DTYPES[self.dtype]
        return [
            LoraPair(
                (torch.randn(rank, self.width, generator=generator) / self.width**0.5).to(dtype),
                (torch.randn(self.width, rank, generator=generator) / rank**0.5).to(dtype),
            )
            for rank in self.ranks
        ]

    def draw_rows(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(self.total_rows, self.width, generator=generator).to(DTYPES[self.dtype])

    def as_row(self) -> dict[str, Any]:
        return asdict(self) | {"d": self.width, "adapters": self.adapters, "cell": self.name}


def load_grid(path: Path, dtypes: Sequence[str], *, quick: bool) -> list[KernelCell]:
    """Return all cells of a grid file. Each group of the file is the product of its lists.

    quick: whether to return only the groups that are marked "quick".
    """
    cells = []
    for group in json.loads(path.read_text())["groups"]:
        if quick and not group.get("quick", False):
            continue
        lists = [group[key] for key in ("requests", "rows", "d", "rank", "popularity", "heat")]
        for dtype, *shape, heat in itertools.product(dtypes, *lists):
            requests, rows, width, rank, popularity = shape
            sizes = (group["regime"], requests, rows, width, rank, popularity)
            cells.append(KernelCell(*sizes, heat == "cold", dtype))
    return list(dict.fromkeys(cells))


class LoraOperator(ABC):
    """One named LoRA operator."""

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    """Type of the operator's rows; None for the cell's type."""

    def why_not(self, cell: KernelCell) -> str | None:
        """Return the reason why this operator cannot run the cell, or None."""
        return None

    @abstractmethod
    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        """Return a call that uses copies of these adapters, so that operators share no weights."""


class Atmm(LoraOperator):
    """ATMM, the operator under test.

    config: index of the tile configuration for all shapes; None to choose it from the table.
    """

    name = "atmm"

    def __init__(self, config: int | None = None) -> None:
        self._config = config

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        group, segments = LoraGroup.of(cell.width, pairs), Segments(cell.segments)
        return lambda y, x: op.apply(y, x, segments, group, config=self._config)


class StaticTile(Atmm):
    """ATMM with one tile configuration for every shape."""

    prefix: ClassVar[str] = "static:"

    def __init__(self, config: int, name: str) -> None:
        super().__init__(config)
        self.name = self.prefix + name  # type: ignore[misc]


class PeftLoop(LoraOperator):
    """PEFT's mixed-batch forward (peft/tuners/lora/layer.py, _mixed_batch_forward).

    For each adapter it gathers the requests' rows, applies two linear modules, multiplies by the
    scale, and adds the result to the rows of y.
    """

    name = "peft_loop"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        modules = {str(i): (_linear(pair.a), _linear(pair.b)) for i, pair in enumerate(pairs)}
        dropout = torch.nn.Identity()
        scaling = 1.0  # B already contains the scale, but PEFT always multiplies by one.
        adapter_names = [str(slot) for slot in cell.slots]
        shape = (cell.requests, cell.rows, cell.width)

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            inputs, result = x.view(shape), y.view(shape)
            unique_adapters = set(adapter_names)
            sub_batches = [
                [index for index, item in enumerate(adapter_names) if item == adapter]
                for adapter in unique_adapters
            ]
            for i, adapter in enumerate(unique_adapters):
                lora_a, lora_b = modules[adapter]
                sub_batch = inputs[sub_batches[i]].to(lora_a.weight.dtype)
                output = lora_b(lora_a(dropout(sub_batch))) * scaling
                result[sub_batches[i]] += output.to(result.dtype)

        return call


class SliceLoop(LoraOperator):
    """Operator that computes two matrix products for each adapter; the second one adds to y.

    The rows of an adapter must be adjacent.
    """

    name = "slice_loop"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        ready = [(pair.a.clone().T, pair.b.clone().T) for pair in pairs]
        parts = [(slice(s.start, s.start + s.length), *ready[s.slot]) for s in cell.segments]

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            for rows, a, b in parts:
                y[rows].addmm_(x[rows] @ a, b)

        return call


class Einsum(LoraOperator):
    """dLoRA's operator: it pads all ranks to the largest, gathers the weights of each row, and
    computes two einsums.
    """

    name = "einsum"

    def why_not(self, cell: KernelCell) -> str | None:
        gathered = 2 * cell.total_rows * max(cell.ranks) * cell.width * DTYPES[cell.dtype].itemsize
        if gathered > MAX_EINSUM_BYTES:
            return f"gathers {gathered / 2**30:.1f} GiB, above {MAX_EINSUM_BYTES / 2**30:.0f}"
        return None

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        a, b = _stacked(pairs)
        index = torch.tensor(cell.slots).repeat_interleave(cell.rows)

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            low_rank = torch.einsum("td,trd->tr", x, a[index])
            y.add_(torch.einsum("tr,tor->to", low_rank, b[index]))

        return call


class Padded(LoraOperator):
    """Operator that computes batched matrix products over all segments.

    Each segment is padded to the length of the longest, and each rank to the largest.
    """

    name = "padded"

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        a, b = _stacked(pairs)
        a, b = a.transpose(1, 2), b.transpose(1, 2)
        segments = cell.segments
        longest = max(segment.length for segment in segments)
        equal = all(segment.length == longest for segment in segments)
        shape = (len(segments), longest, cell.width)
        padded_rows = torch.cat([torch.arange(s.length) + s.slot * longest for s in segments])

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            if equal:
                y.view(shape).baddbmm_(torch.bmm(x.view(shape), a), b)
                return
            inputs = x.new_zeros(shape)
            inputs.view(-1, cell.width)[padded_rows] = x
            y.add_(torch.bmm(torch.bmm(inputs, a), b).view(-1, cell.width)[padded_rows])

        return call


class InFloat32(LoraOperator):
    """Baseline with fp32 weights and rows for a bf16 cell.

    A program on a CPU without bf16 instructions would use the baseline in this way.
    """

    dtype: ClassVar[torch.dtype | None] = torch.float32

    def __init__(self, inner: LoraOperator) -> None:
        self._inner = inner
        self.name = f"{inner.name}_in_fp32"  # type: ignore[misc]

    def why_not(self, cell: KernelCell) -> str | None:
        return "the cell is fp32" if cell.dtype == "fp32" else self._inner.why_not(cell)

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        return self._inner.prepare([LoraPair(p.a.float(), p.b.float()) for p in pairs], cell)


BASELINES: tuple[LoraOperator, ...] = (PeftLoop(), SliceLoop(), Einsum(), Padded())


def static_tiles(dtype: str) -> list[LoraOperator]:
    """Return the candidates for the best single static tile.

    They are the built-in choices, and the tiles that the tables name most often: two that compute
    the whole depth at a time, and two with a depth block. A tile outside this list can be better.
    The speed-up over these candidates is therefore an upper bound of the gain of adaptive choice.
    """
    if not is_compiled():
        return []
    configs = tiles.configs("apply", dtype)
    index = {config["name"]: i for i, config in enumerate(configs)}
    counts = _table_counts(dtype)
    names = sorted(counts.keys() & index.keys(), key=lambda name: -counts[name])
    streaming = [name for name in names if not configs[index[name]]["depth_block"]]
    blocking = [name for name in names if configs[index[name]]["depth_block"]]
    built_in = (
        tiles.built_in("apply", dtype, rows=rows, d_in=1024, d_out=1024, rank=64, segments=1)
        for rows in (1, 64)
    )
    chosen = dict.fromkeys((*streaming[:2], *blocking[:2], *built_in))
    return [StaticTile(index[name], name) for name in chosen if name in index]


def _table_counts(dtype: str) -> Counter[str]:
    """Return how often each tile configuration occurs in the tables of the instruction set."""
    counts: Counter[str] = Counter()
    for path in (Path(atmm_package.__file__).parent / "tables").glob("*.json"):
        table = json.loads(path.read_text())
        if (table["isa"], table["dtype"]) == (native.kernels().runtime.isa(dtype), dtype):
            counts.update(table["configs"])
    return counts


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return module


def _stacked(pairs: Sequence[LoraPair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [adapters, r, d_in] and B [adapters, d_out, r], with ranks padded by zeros."""
    rank = max(pair.rank for pair in pairs)
    a = pairs[0].a.new_zeros(len(pairs), rank, pairs[0].a.shape[1])
    b = pairs[0].b.new_zeros(len(pairs), pairs[0].b.shape[0], rank)
    for i, pair in enumerate(pairs):
        a[i, : pair.rank] = pair.a
        b[i, :, : pair.rank] = pair.b
    return a, b

"""The grid of the kernels benchmark: its shapes and their random data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.dtypes import DTYPES
from vlora.atmm.types import LoraPair, Segment

MIXED_RANKS = (8, 64, 16, 128, 32)
ZIPF_EXPONENT = 1.2
POPULARITIES = ("identical", "distinct", "zipf")
REGIMES = ("decode", "prefill")


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

    @property
    def slots(self) -> tuple[int, ...]:
        """Adapter slot of each request, sorted as in the engine."""
        if self.popularity == "identical":
            return (0,) * self.requests
        if self.popularity == "distinct":
            return tuple(range(self.requests))
        weights = torch.arange(1, self.requests + 1, dtype=torch.float64) ** -ZIPF_EXPONENT
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
        return {
            "regime": self.regime,
            "requests": self.requests,
            "rows": self.rows,
            "adapters": self.adapters,
            "d": self.width,
            "rank": self.rank,
            "popularity": self.popularity,
            "cold": self.cold,
            "dtype": self.dtype,
        }


_GROUP_KEYS = {"regime", "requests", "rows", "d", "rank", "popularity", "heat", "quick"}


def load_grid(path: Path, dtypes: Sequence[str], *, quick: bool) -> list[KernelCell]:
    """Return all cells of a grid file. Each group of the file is the product of its lists.

    quick: whether to return only the groups that are marked "quick".

    Raises ValueError for an unknown or missing key, and for an unknown regime or popularity.
    """
    cells = []
    for group in json.loads(path.read_text())["groups"]:
        if unknown := set(group) ^ (_GROUP_KEYS - {"quick"} | set(group) & {"quick"}):
            raise ValueError(f"{path.name}: keys {sorted(unknown)} are unknown or missing")
        if group["regime"] not in REGIMES or not set(group["popularity"]) <= set(POPULARITIES):
            raise ValueError(
                f"{path.name}: {group} has an unknown regime or popularity; valid are"
                f" {', '.join(REGIMES)} and {', '.join(POPULARITIES)}"
            )
        if quick and not group.get("quick", False):
            continue
        cells += [cell for dtype in dtypes for cell in _cells_of(group, dtype)]
    return list(dict.fromkeys(cells))


def _cells_of(group: dict[str, Any], dtype: str) -> Iterator[KernelCell]:
    for requests, rows, width, rank, popularity, heat in itertools.product(
        *(group[key] for key in ("requests", "rows", "d", "rank", "popularity", "heat"))
    ):
        yield KernelCell(
            group["regime"], requests, rows, width, rank, popularity, heat == "cold", dtype
        )

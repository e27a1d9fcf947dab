"""Tests of the height of a product's register tile: the lines that it reads together fit in L1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.atmm_problems import compiled
from vlora import native

LINE = 64
LANES = 16
"""Rows of x in a panel. A panel has their fp32 values at one depth in one line of the cache."""


@dataclass(frozen=True)
class L1:
    """A set-associative data cache of `size` bytes that evicts the least recently used line."""

    size: int
    ways: int

    def misses(self, addresses: list[int]) -> set[int]:
        """Return the positions of the addresses that are not in the cache when they are read."""
        sets: dict[int, list[int]] = {}
        missing = set()
        for position, address in enumerate(addresses):
            line = address // LINE
            lines = sets.setdefault(line % (self.size // LINE // self.ways), [])
            if line in lines:
                lines.remove(line)
            else:
                missing.add(position)
            lines.append(line)
            del lines[: -self.ways]
        return missing


CACHES = {"zen 3": L1(32 << 10, 8), "zen 4": L1(32 << 10, 8), "ice lake": L1(48 << 10, 12)}
TILES = [(12, 1), (12, 2), (24, 1), (24, 2), (24, 3), (24, 4)]
"""(accumulators, registers of x) of a tile: half a panel or one with AVX2, then 1 to 4 panels with
AVX-512."""


def misses_of_a_tile(l1: L1, rows: int, registers: int, depth: int, size: int) -> float:
    """Return how often a tile fetches a line of W from beyond L1, per line.

    rows, registers: of W and of x. depth: elements of `size` bytes in a row of W.
    """
    panels = 1 << 30
    reads, is_w = [], []
    for step in range(256):
        reads += [row * depth * size + step * size for row in range(rows)]
        reads += [panels + r * depth * LINE + step * LINE for r in range(registers)]
        is_w += [True] * rows + [False] * registers
    missing = [position for position in l1.misses(reads) if is_w[position]]
    return len(missing) / (rows * 256 * size / LINE)


def tile_rows(l1: L1, accumulators: int, registers: int, depth: int, size: int) -> int:
    rows = native.kernels().gemm.in_place_tile_rows(
        accumulators=accumulators,
        registers=registers,
        l1=l1.size,
        ways=l1.ways,
        line=LINE,
        stride=depth * size,
    )
    return int(rows)


@compiled
@pytest.mark.parametrize("size", [4, 2], ids=["fp32", "bf16"])
@pytest.mark.parametrize("depth", [1024, 1040, 1025, 1536, 2816, 4096, 8192])
@pytest.mark.parametrize("cpu", CACHES)
def test_a_tile_keeps_the_lines_of_its_rows_in_l1(cpu: str, depth: int, size: int) -> None:
    """The rows of many matrices are a multiple of 4 KiB apart, so their lines share one set."""
    l1 = CACHES[cpu]
    for accumulators, registers in TILES:
        rows = tile_rows(l1, accumulators, registers, depth, size)
        assert rows in (min(accumulators // registers, 12), 6)
        assert misses_of_a_tile(l1, rows, registers, depth, size) <= 1.5


def test_lines_of_more_rows_than_ways_are_fetched_at_every_step() -> None:
    for cpu, rows in (("zen 3", 12), ("zen 4", 24), ("ice lake", 24)):
        assert misses_of_a_tile(CACHES[cpu], rows, 1, 1024, 4) == LINE / 4


@compiled
def test_tall_tiles_are_used_where_rows_fall_on_different_sets() -> None:
    zen, ice_lake = CACHES["zen 4"], CACHES["ice lake"]
    assert [tile_rows(zen, 24, n, 1024, 4) for n in (1, 2, 3, 4)] == [6, 6, 6, 6]
    assert [tile_rows(ice_lake, 24, n, 1024, 4) for n in (1, 2, 3, 4)] == [6, 6, 8, 6]
    assert [tile_rows(zen, 24, n, 1024, 2) for n in (1, 2, 3, 4)] == [12, 12, 8, 6]
    assert [tile_rows(zen, 24, n, 1040, 4) for n in (1, 2, 3, 4)] == [12, 12, 8, 6]
    assert [tile_rows(zen, 12, n, 1024, 4) for n in (1, 2)] == [6, 6]
    assert [tile_rows(zen, 12, n, 2816, 4) for n in (1, 2)] == [12, 6]


@compiled
def test_the_associativity_of_l1_is_read_from_the_system(tmp_path: Path) -> None:
    runtime = native.kernels().runtime
    missing = runtime.caches_of(str(tmp_path))
    assert (missing["l1"], missing["l1_ways"], missing["l1_line"]) == (32 << 10, 8, 64)
    files = {"level": "1", "type": "Data", "size": "48K", "ways_of_associativity": "12"}
    (tmp_path / "index0").mkdir()
    for name, text in (files | {"coherency_line_size": "128"}).items():
        (tmp_path / "index0" / name).write_text(text + "\n")
    found = runtime.caches_of(str(tmp_path))
    assert (found["l1"], found["l1_ways"], found["l1_line"]) == (48 << 10, 12, 128)

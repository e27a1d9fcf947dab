"""Tests of the height of a product's register tile: the lines that it reads together fit in L1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.atmm_problems import compiled
from vlora import native

LINE = 64


@dataclass(frozen=True)
class L1:
    """A set-associative data cache of `size` bytes."""

    size: int
    ways: int


ZEN, ICE_LAKE = L1(32 << 10, 8), L1(48 << 10, 12)


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
def test_tall_tiles_are_used_only_where_rows_fall_on_different_sets() -> None:
    """The rows of many matrices are a multiple of 4 KiB apart, so their lines share one set.

    A tile of 12 rows would fetch each line of 64 bytes of W once for every fp32 value, 16 times.
    A tile has 12 accumulators with AVX2, for half a panel or one, and 24 with AVX-512, for 1 to 4.
    """
    for l1, size, depths, rows in (
        (ZEN, 4, (1024, 1025, 4096, 8192), [6, 6, 6, 6]),
        (ZEN, 4, (1040, 1536, 2816), [12, 12, 8, 6]),
        (ZEN, 2, (4096, 8192), [6, 6, 6, 6]),
        (ZEN, 2, (1024, 1025, 1536), [12, 12, 8, 6]),
        (ICE_LAKE, 4, (1024, 1025, 4096, 8192), [6, 6, 8, 6]),
        (ICE_LAKE, 4, (1040, 1536, 2816), [12, 12, 8, 6]),
        (ICE_LAKE, 2, (4096, 8192), [6, 6, 8, 6]),
        (ICE_LAKE, 2, (1024, 1025, 1536), [12, 12, 8, 6]),
    ):
        for depth in depths:
            assert [tile_rows(l1, 24, n, depth, size) for n in (1, 2, 3, 4)] == rows, depth
    assert [tile_rows(ZEN, 12, n, 1024, 4) for n in (1, 2)] == [6, 6]
    assert [tile_rows(ZEN, 12, n, 2816, 4) for n in (1, 2)] == [12, 6]


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

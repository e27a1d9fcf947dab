"""Tile configurations of the compiled core, the table that chooses among them, and its limits.

A thin, typed face of the core; the look-up itself is C++ (csrc/atmm/include/atmm/table.h).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, Unpack, cast

from vlora import native
from vlora.atmm.device import Device

log = logging.getLogger(__name__)

Operation = Literal["apply", "merge"]
OPERATIONS: tuple[Operation, ...] = ("apply", "merge")
"""In the order of their numbers in keys."""
DTYPE_NAMES = ("fp32", "bf16")
TABLES = Path(__file__).parent / "tables"
VERSION = 2
"""Of the table's file format; version 1 had no microseconds, and is read as well."""


def isas(dtype: str = "fp32") -> list[str]:
    """Instruction sets that were compiled and that this CPU can run, best first: by a peak that a
    millisecond measures, once in a process."""
    return cast(list[str], native.kernels().runtime.isas(dtype))


def current_isa(dtype: str) -> str:
    """The one that products of this type use: the first of `isas`, unless another is forced here or
    by the environment (VLORA_ISA)."""
    return str(native.kernels().runtime.isa(dtype))


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Use one instruction set for both types for a while; ValueError for one that this CPU cannot
    run. "twin" is AMX in plain C++, for tests."""
    core = native.kernels().runtime
    before = core.requested_isa()
    core.request_isa(name)
    try:
        yield
    finally:
        core.request_isa(before)


def widest(dtype: str) -> int:
    """Columns of the widest register tile of the current instruction set; wider configurations
    run as this one."""
    return 16 * int(native.kernels().atmm.bundle(dtype))


def configs(operation: Operation, dtype: str) -> list[dict[str, Any]]:
    """Every compiled configuration of the current instruction set; its index is its number."""
    return cast(list[dict[str, Any]], native.kernels().atmm.configs(operation, dtype))


class Sizes(TypedDict):
    """What a choice of tile depends on, beside the operation and the type; in the core's order."""

    rows: int
    d_in: int
    d_out: int
    rank: int
    segments: int
    threads: NotRequired[int]  # 1


@dataclass(frozen=True)
class Measured:
    """One entry of a table: a bucket's largest shape, its tile, and what a call took.

    rows of each segment, segments of the call, threads of it; microseconds of the whole call, the
    adapters in cache (hot) and out of it (cold); None where they were not measured.
    """

    operation: Operation
    dtype: str
    rows: int
    d_in: int
    d_out: int
    rank: int
    segments: int
    threads: int
    config: str
    hot_us: float | None
    cold_us: float | None

    @classmethod
    def of(cls, key: int, entry: Any) -> Measured:
        """From a table's key and entry: [configuration, hot µs, cold µs], or the first alone."""
        name, hot, cold = (entry, *2 * (None,)) if isinstance(entry, str) else entry
        field = [key >> shift & 0xFF for shift in range(0, 48, 8)]
        return cls(
            OPERATIONS[field[0]],
            DTYPE_NAMES[field[1]],
            rows=1 << field[2],
            d_in=key >> 64 & 0xFFFFFFFF,
            d_out=key >> 96,
            rank=1 << field[3],
            segments=1 << field[4],
            threads=1 << field[5],
            config=str(name),
            hot_us=hot,
            cold_us=cold,
        )


def key(operation: Operation, dtype: str, **sizes: Unpack[Sizes]) -> int:
    """The 128-bit key of a shape's buckets."""
    low, high = native.kernels().atmm.key(operation, dtype, *_in_order(sizes))
    return int(high) << 64 | int(low)


def built_in(operation: Operation, dtype: str, **sizes: Unpack[Sizes]) -> str:
    """The configuration that a shape gets where no table says otherwise."""
    return str(native.kernels().atmm.built_in(operation, dtype, *_in_order(sizes)))


def _in_order(sizes: Sizes) -> tuple[int, ...]:
    first = sizes["rows"], sizes["d_in"], sizes["d_out"], sizes["rank"], sizes["segments"]
    return (*first, sizes.get("threads", 1))


def use(entries: Mapping[int, str]) -> None:
    """Replace the current instruction set's table: key → configuration name (ValueError for an
    unknown one)."""
    mask = (1 << 64) - 1
    native.kernels().atmm.use_table([(k & mask, k >> 64, name) for k, name in entries.items()])


def read_table(path: Path) -> dict[int, Measured]:
    """A table's entries by key; needs no compiled core. ValueError for a version that is not known.

    The file: {"version", …, "entries": {key in hexadecimal: [configuration, hot µs, cold µs]}}.
    """
    table = json.loads(path.read_text())
    if table.get("version") not in (1, VERSION):
        raise ValueError(f"{path} has version {table.get('version')}; 1 and {VERSION} are read")
    return {int(k, 16): Measured.of(int(k, 16), entry) for k, entry in table["entries"].items()}


def measured_for_this_cpu(dtype: str, isa: str, folder: Path = TABLES) -> list[Measured]:
    """What was measured on a CPU like this one by an instruction set; [] without a table."""
    path = _table(folder, isa, dtype)
    return [] if path is None else list(read_table(path).values())


def load(*paths: Path) -> None:
    """Use the tables in files, one a dtype. ValueError for another version, or a configuration that
    this build does not have."""
    entries: dict[int, str] = {}
    for path in paths:
        entries |= {key: entry.config for key, entry in read_table(path).items()}
    use(entries)


def load_for_this_cpu(folder: Path = TABLES) -> list[Path]:
    """Use the committed tables of this CPU and the current instruction set, or of one near it
    (vendor, family, L2); [] if there are none or they are of another build (logged: the built-in
    tiles then serve)."""
    found = (_table(folder, current_isa(dtype), dtype) for dtype in DTYPE_NAMES)
    paths = [path for path in found if path is not None]
    if not paths:
        return []  # what somebody has loaded stays
    try:
        load(*paths)
    except ValueError as error:
        log.warning("ATMM: tile tables are left out: %s", error)
        return []
    return paths


def _table(folder: Path, isa: str, dtype: str) -> Path | None:
    device, end = Device.here(), f"-{isa}-{dtype}.json"
    exact = folder / (device.name + end)
    if exact.exists():
        return exact
    near = (
        path
        for path in sorted(folder.glob(f"*{end}"))
        if device.is_near(path.name.removesuffix(end))
    )
    return next(near, None)


def clear() -> None:
    """Back to the built-in choice for every shape."""
    use({})


def counters() -> dict[str, int]:
    """Look-ups so far: hits, misses that took the nearest bucket, defaults (no table)."""
    return cast(dict[str, int], native.kernels().atmm.counters())


def reset_counters() -> None:
    native.kernels().atmm.reset_counters()


@contextmanager
def pinned(name: str | None = None) -> Iterator[None]:
    """One tile for every shape (the built-in one by default), and sums in one order: a row's
    output is then bit-identical whatever the batch."""
    core = native.kernels().atmm
    before = core.pin(name or "default")
    try:
        yield
    finally:
        core.pin(before)


def peak(dtype: str, seconds: float, threads: int = 1) -> float:
    """flop/s of a register-only loop, by the fastest way that the current instruction set has for
    this type (bf16: pairs, tiles, or fp32's where these are slower)."""
    return float(native.kernels().runtime.peak(dtype, seconds, threads))


def bandwidth(size: int, seconds: float, threads: int = 1) -> float:
    """bytes/s read from a working set of `size` bytes, shared out among the threads, which all read
    at the same time."""
    return float(native.kernels().runtime.bandwidth(size, seconds, threads))


def built_in_on(
    operation: Operation, dtype: str, *, rows: int, rank: int, l1: int, l2: int, memory: float,
    widening: bool, multiplies_tiles: bool,
) -> str:  # fmt: skip
    """`built_in` on a machine of the caller's: bytes of L1 and L2, bytes/s that a core reads from
    memory; widening: its instruction set makes bf16 panels fp32; multiplies_tiles: it has a unit
    for them."""
    core = native.kernels().atmm
    machine = l1, l2, memory, widening, multiplies_tiles
    return str(core.built_in_on(operation, dtype, rows, rank, *machine))


def read(address: int, size: int, threads: int = 1) -> None:
    """Read `size` bytes of fp32 at `address` once, shared out among the threads."""
    native.kernels().runtime.read(address, size, threads)


def multiply(dtype: str, rounds: int, threads: int = 1) -> float:
    """The loop of `peak`, `rounds` times on every thread. Returns the flops done."""
    return float(native.kernels().runtime.multiply(dtype, rounds, threads))

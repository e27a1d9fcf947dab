"""Tile configurations of the compiled core, and the tables from which they are chosen by shape.

The look-up is in C++ (csrc/atmm/include/atmm/table.h).
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from vlora import native
from vlora.atmm.cpu import Cpu
from vlora.atomic_file import replace_text

log = logging.getLogger(__name__)

Operation = Literal["apply", "merge"]
# Operations of the LoRA operator. In the keys of tables, an operation is represented by its index
# here.
OPERATIONS: tuple[Operation, ...] = ("apply", "merge")
DTYPE_NAMES = ("fp32", "bf16")
TABLES = Path(__file__).parent / "tables"
# Version of the tables' file format. Version 1, which has no microseconds, can also be read.
VERSION = 2


def isas(dtype: str = "fp32") -> list[str]:
    """Return the instruction sets that were compiled and that this CPU can run, fastest first.

    Their peaks are measured once. An older set precedes a newer one only if its peak is more than
    10 % higher. "scalar" is last.
    """
    return cast(list[str], native.kernels().runtime.isas(dtype))


def current_isa(dtype: str) -> str:
    """Return the instruction set of products of this type: the first of `isas` unless set."""
    return str(native.kernels().runtime.isa(dtype))


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Use one instruction set within the context, or one for fp32 and another for bf16.

    name: a name from `isas`, or "twin", which is AMX emulated in plain C++ for tests; or two names
        with a comma between them, for fp32 and bf16.

    Raises ValueError for an instruction set that this CPU cannot run.
    """
    core = native.kernels().runtime
    before = core.requested_isa()
    core.request_isa(name)
    try:
        yield
    finally:
        core.request_isa(before)


def widest(dtype: str) -> int:
    """Return the columns of the widest register tile, which replaces wider tiles."""
    return 16 * int(native.kernels().atmm.bundle(dtype))


def configs(operation: Operation, dtype: str) -> list[dict[str, Any]]:
    """Return all tile configurations for the current instruction set.

    The argument `config` of the operator's functions is an index in this list.
    """
    return cast(list[dict[str, Any]], native.kernels().atmm.configs(operation, dtype))


class Sizes(NamedTuple):
    """Sizes on which the choice of a tile depends, in the order of the core's arguments."""

    rows: int
    d_in: int
    d_out: int
    rank: int
    segments: int
    threads: int = 1


@dataclass(frozen=True)
class TableEntry:
    """Entry of a table: the largest shape of a bucket, its tile, and the time of a call.

    rows: number of rows of each segment.
    config: name of the tile configuration.
    hot_us, cold_us: microseconds of the call with the adapters in cache or not; None if not
        measured.
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
    def of(cls, key: int, entry: Any) -> TableEntry:
        """Return the entry that a table stores under a key.

        entry: stored value: [configuration, hot µs, cold µs], or the configuration alone.
        """
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


def key(operation: Operation, dtype: str, **sizes: int) -> int:
    """Return the 128-bit key of the bucket that a shape belongs to. sizes: see `Sizes`."""
    low, high = native.kernels().atmm.key(operation, dtype, *Sizes(**sizes))
    return int(high) << 64 | int(low)


def built_in(operation: Operation, dtype: str, **sizes: int) -> str:
    """Return the name of the tile configuration that a shape gets without a table."""
    return str(native.kernels().atmm.built_in(operation, dtype, *Sizes(**sizes)))


def use(entries: Mapping[int, str]) -> None:
    """Replace the table of the current instruction set by entries key → configuration.

    Raises ValueError for an unknown configuration.
    """
    mask = (1 << 64) - 1
    native.kernels().atmm.use_table([(k & mask, k >> 64, name) for k, name in entries.items()])


def read_table(path: Path) -> dict[int, TableEntry]:
    """Return a table's entries by key. The compiled core is not needed.

    The file contains {"version", …, "entries": {key in hexadecimal: [configuration, hot µs, cold
    µs]}}. Raises ValueError for an unsupported version.
    """
    table = json.loads(path.read_text())
    if table.get("version") not in (1, VERSION):
        raise ValueError(
            f"{path} has version {table.get('version')}; versions 1 and {VERSION} are supported"
        )
    return {int(k, 16): TableEntry.of(int(k, 16), entry) for k, entry in table["entries"].items()}


def load(*paths: Path) -> None:
    """Replace the table of the current instruction set by these files, one file per dtype.

    Raises ValueError for an unsupported version, or a configuration that this build lacks.
    """
    entries: dict[int, str] = {}
    for path in paths:
        entries |= {key: entry.config for key, entry in read_table(path).items()}
    use(entries)


def load_for_this_cpu(folder: Path = TABLES) -> list[Path]:
    """Load the committed tile tables for the current instruction set and return their paths.

    These are the tables of this CPU, or else of a CPU with the same vendor, family and L2 size. If
    there are none, or they do not fit this build, the table in use stays.
    """
    tables = (_table(folder, current_isa(dtype), dtype) for dtype in DTYPE_NAMES)
    paths = [path for path in tables if path is not None]
    if not paths:
        return []
    try:
        load(*paths)
    except ValueError as error:
        log.warning("ATMM: tile tables are ignored: %s", error)
        return []
    return paths


def table_path(device: Cpu, isa: str, dtype: str, folder: Path = TABLES) -> Path:
    return folder / f"{device.name}-{isa}-{dtype}.json"


def _table(folder: Path, isa: str, dtype: str) -> Path | None:
    device, suffix = Cpu.here(), f"-{isa}-{dtype}.json"
    exact = table_path(device, isa, dtype, folder)
    near = [
        path
        for path in sorted(folder.glob(f"*{suffix}"))
        if device.is_near(path.name.removesuffix(suffix))
    ]
    return exact if exact.exists() else next(iter(near), None)


def write_table(
    path: Path, device: Cpu, isa: str, dtype: str, found: Iterable[Mapping[str, Any]], **notes: Any
) -> None:
    """Write the table atomically, so that an engine never reads a partly written file.

    found: entries with the keys `key`, `config`, and if measured `hot_us` and `cold_us`.
    """
    found = sorted(found, key=lambda entry: str(entry["key"]))
    table = {
        "version": VERSION,
        "device": vars(device),
        "isa": isa,
        "dtype": dtype,
        "searched": {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **notes},
        "configs": dict(Counter(entry["config"] for entry in found).most_common()),
        "entries": {},
    }
    entries = {e["key"]: [e["config"], e.get("hot_us"), e.get("cold_us")] for e in found}
    # One entry per line.
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
    start = json.dumps(table, indent=1).removesuffix("{}\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, f"{start}{{\n{lines}\n }}\n}}\n")

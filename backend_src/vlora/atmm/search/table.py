"""Writing of tile tables: one file for each CPU, instruction set and storage type."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vlora.atmm.cpu import Cpu
from vlora.atmm.tiles import TABLES, VERSION
from vlora.atomic_file import replace_text

__all__ = ["TABLES", "Cpu", "path_for", "write"]


def path_for(device: Cpu, isa: str, dtype: str, folder: Path = TABLES) -> Path:
    return folder / f"{device.name}-{isa}-{dtype}.json"


def write(
    path: Path,
    device: Cpu,
    isa: str,
    dtype: str,
    found: Iterable[Mapping[str, Any]],
    **searched: Any,
) -> None:
    """Write the table atomically, so that an engine never reads a partly written file."""
    found = sorted(found, key=lambda entry: str(entry["key"]))
    table = {
        "version": VERSION,
        "device": vars(device),
        "isa": isa,
        "dtype": dtype,
        "searched": {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **searched},
        "configs": dict(Counter(entry["config"] for entry in found).most_common()),
        "entries": {
            entry["key"]: [entry["config"], entry.get("hot_us"), entry.get("cold_us")]
            for entry in found
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, _text(table))


def _text(table: Mapping[str, Any]) -> str:
    """Return JSON with one entry per line."""
    entries = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table["entries"].items())
    rest = json.dumps({**table, "entries": {}}, indent=1)
    return rest.removesuffix("{}\n}") + "{\n" + entries + "\n }\n}\n"

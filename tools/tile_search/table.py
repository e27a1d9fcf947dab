"""The tile table's file: one for each device, instruction set and storage type."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
"""Of the file format; `vlora.atmm.tiles` reads the same."""
TABLES = Path(__file__).resolve().parents[2] / "backend_src" / "vlora" / "atmm" / "tables"


@dataclass(frozen=True)
class Device:
    """What tells CPUs apart where virtual machines hide the name: family, model, caches in KiB."""

    vendor: str
    family: int
    model: int
    l1: int
    l2: int
    l3: int

    @classmethod
    def here(cls, root: Path = Path("/")) -> Device:
        fields: dict[str, str] = {}
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
        sizes = {1: 0, 2: 0, 3: 0}
        for index in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
            if (index / "type").read_text().strip() != "Instruction":
                size = re.fullmatch(r"(\d+)K", (index / "size").read_text().strip())
                sizes[int((index / "level").read_text())] = int(size[1]) if size else 0
        return cls(
            fields.get("vendor_id", "unknown"),
            int(fields.get("cpu family", 0)),
            int(fields.get("model", 0)),
            sizes[1],
            sizes[2],
            sizes[3],
        )

    @property
    def name(self) -> str:
        """As in file names: amd-f26-m2-48-1024-32768."""
        vendor = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(self.vendor, self.vendor)
        return f"{vendor.lower()}-f{self.family}-m{self.model}-{self.l1}-{self.l2}-{self.l3}"


def path_for(device: Device, isa: str, dtype: str, folder: Path = TABLES) -> Path:
    return folder / f"{device.name}-{isa}-{dtype}.json"


def write(
    path: Path,
    device: Device,
    isa: str,
    dtype: str,
    found: Iterable[Mapping[str, Any]],
    **searched: Any,
) -> None:
    """Atomically, so that an engine that starts meanwhile reads the old table or the new."""
    found = sorted(found, key=lambda entry: str(entry["key"]))
    table = {
        "version": VERSION,
        "device": vars(device),
        "isa": isa,
        "dtype": dtype,
        "searched": {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **searched},
        "configs": dict(Counter(entry["config"] for entry in found).most_common()),
        "entries": {entry["key"]: entry["config"] for entry in found},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(table, indent=1) + "\n")
    draft.replace(path)

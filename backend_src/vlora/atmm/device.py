"""What tells one CPU from another: virtual machines hide the marketing name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """Vendor, family, model, and data caches in KiB."""

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
    def cold_bytes(self) -> int:
        """A working set that the caches do not hold: four times the last level, in bytes. At most
        256 MiB: a virtual machine reports a host's cache, of which it has a part."""
        return min(max(4 * self.l3 << 10, 128 << 20), 256 << 20)

    def is_near(self, name: str) -> bool:
        """Whether a name is of a device with this vendor, family and L2. The model and the last
        level are a virtual machine's to make up."""
        ours, others = self.name.split("-"), name.split("-")
        return len(others) == len(ours) and all(ours[i] == others[i] for i in (0, 1, 4))

    @property
    def name(self) -> str:
        """As in the names of tile tables: amd-f26-m2-48-1024-32768."""
        vendor = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(self.vendor, self.vendor)
        return f"{vendor.lower()}-f{self.family}-m{self.model}-{self.l1}-{self.l2}-{self.l3}"

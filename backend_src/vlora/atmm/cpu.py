"""Identification of a CPU by vendor, family, model and cache sizes.

The product name is not used, because virtual machines hide it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cpu:
    """A CPU.

    l1, l2, l3: sizes in KiB of the data caches of the first core; 0 for a cache that it lacks.
    """

    vendor: str
    family: int
    model: int
    l1: int
    l2: int
    l3: int

    @classmethod
    def here(cls, root: Path = Path("/")) -> Cpu:
        """Return this machine's CPU.

        root: folder that contains `proc` and `sys`. Only tests replace the default.
        """
        fields: dict[str, str] = {}
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
        sizes = {1: 0, 2: 0, 3: 0}
        for index in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
            if (index / "type").read_text().strip() != "Instruction":
                size = re.fullmatch(r"(\d+)K", (index / "size").read_text().strip())
                sizes[int((index / "level").read_text())] = int(size[1]) if size else 0
        vendor, family = fields.get("vendor_id", "unknown"), int(fields.get("cpu family", 0))
        return cls(vendor, family, int(fields.get("model", 0)), sizes[1], sizes[2], sizes[3])

    @property
    def cold_bytes(self) -> int:
        """Size in bytes of a working set that should not fit into the caches.

        It has a maximum, because a virtual machine reports the cache of the whole host.
        """
        return min(max(4 * self.l3 << 10, 128 << 20), 256 << 20)

    def is_near(self, name: str) -> bool:
        """Return whether `name` is that of a CPU with the same vendor, family and L2 cache.

        A virtual machine may report any model and last-level cache.
        """
        ours, others = self.name.split("-"), name.split("-")
        return len(others) == len(ours) and all(ours[i] == others[i] for i in (0, 1, 4))

    @property
    def name(self) -> str:
        """Vendor, family, model and KiB of L1, L2 and L3, such as amd-f26-m2-48-1024-32768."""
        vendor = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(self.vendor, self.vendor)
        return f"{vendor.lower()}-f{self.family}-m{self.model}-{self.l1}-{self.l2}-{self.l3}"

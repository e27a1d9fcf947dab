"""Host memory: huge pages, and what this process can still allocate."""

from __future__ import annotations

import contextlib
import math
import mmap
import re
from pathlib import Path

import torch

from vlora.cores import CGROUPS, PROCESS, tightest_limit

# Size of a huge page in bytes. A core reads memory in huge pages 1.5 times as fast as in pages of
# 4 KiB, because small pages need far more page table walks.
PAGE = 2 << 20


def hugepage_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that begin at a huge page, which the kernel provides when it is written."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    memory = mmap.mmap(-1, size + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # The kernel may lack huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


MEMINFO = Path("/proc/meminfo")


def available_bytes(
    meminfo: Path = MEMINFO, process: Path = PROCESS, root: Path = CGROUPS
) -> int | None:
    """Return the number of bytes that this process can still allocate, in the machine and within
    its control groups; None if unknown. Only tests replace the kernel's files.
    """
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    machine = None if match is None else int(match[1]) * 1024
    group = tightest_limit(_version_2, "memory", _version_1, process, root)
    return min([int(value) for value in (machine, group) if value is not None], default=None)


def _version_2(folder: Path) -> float | None:
    return _bytes_left(folder, "memory.max", "memory.current", "inactive_file")


def _version_1(folder: Path) -> float | None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return _bytes_left(folder, *names)


def _bytes_left(folder: Path, limit: str, usage: str, inactive: str) -> float | None:
    try:
        allowed = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    # The kernel drops inactive file pages when an allocation needs their memory.
    match = re.search(rf"^{inactive} (\d+)$", stat, re.MULTILINE)
    return max(1, allowed - used + (int(match[1]) if match else 0))

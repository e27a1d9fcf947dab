"""Memory that was freed stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, threading
import vlora, torch
def faults():
    for turn in range(12):
        if turn == 9:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        blocks = [torch.empty(size << 20, dtype=torch.uint8) for size in (3, 12, 6)]
        for block in blocks:
            ctypes.memset(block.data_ptr(), 1, block.numel())
        del block, blocks
    found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
found = []
faults()
thread = threading.Thread(target=faults)
thread.start()
thread.join()
print(max(found))
"""
PAGES = 3 * (21 << 20) // 4096
"""Written after the first turns."""


def _faults(**variables: str) -> int:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_results_as_large_as_the_last_ones_take_no_new_pages() -> None:
    assert _faults() < PAGES // 10


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_what_the_user_has_set_stays() -> None:
    assert _faults(MALLOC_MMAP_THRESHOLD_="65536") > PAGES // 2

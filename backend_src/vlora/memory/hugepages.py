"""Memory in huge pages, for data that each step reads completely.

A core reads memory in huge pages 1.5 times as fast as memory in pages of 4 KiB, because small pages
need far more page table walks.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

PAGE = 2 << 20
"""Size of a huge page in bytes."""


def hugepage_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros whose memory begins at the start of a huge page.

    The kernel uses huge pages if it has them. The operating system provides the memory only when it
    is written.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    memory = mmap.mmap(-1, size + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # The kernel may lack huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)

"""Threads that wait sleep: set before torch's OpenMP runtime loads, for it reads this only once.

Spinning threads take a core from whoever has work: our own kernels' pool, the encoder's process, a
neighbour. A server always has company (decision 33).
"""

from __future__ import annotations

import os

POLICY = {
    "OMP_WAIT_POLICY": "PASSIVE",  # GNU's runtime (torch's wheels), and LLVM's
    "KMP_BLOCKTIME": "0",  # Intel's, where somebody has put it in its place
}


def set_policy() -> None:
    """For this process and its children; what the user has set stays."""
    for variable, value in POLICY.items():
        os.environ.setdefault(variable, value)

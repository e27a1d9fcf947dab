"""Environment variables that make waiting OpenMP threads sleep instead of spin.

A spinning thread takes a core from our kernels' threads, the encoder's process or another process
(decision 33). torch's OpenMP runtime reads the variables when it is loaded, so they must be set
before torch is imported.
"""

from __future__ import annotations

import os

POLICY = {
    # Read by GNU's runtime, which is in torch's wheels, and by LLVM's.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Read by Intel's runtime, which may be installed in their place.
    "KMP_BLOCKTIME": "0",
}


def set_policy() -> None:
    """Set the variables for this process and its children, unless the user has set them."""
    for variable, value in POLICY.items():
        os.environ.setdefault(variable, value)

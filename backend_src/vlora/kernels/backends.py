"""Which implementation of the step's kernels serves: resolved once, logged with its reason."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal

from vlora import native

log = logging.getLogger(__name__)

Backend = Literal["cpu", "reference"]

VARIABLE = "VLORA_KERNELS"
"""Environment variable that names the backend, for tests and for a doubtful machine."""


@cache
def default() -> Backend:
    """The compiled kernels where they were built; else their twins in plain torch, with one
    warning. Raises ValueError for an unknown name."""
    asked = os.environ.get(VARIABLE)
    if asked == "reference":
        log.info("kernels: plain torch, since %s says so", VARIABLE)
        return "reference"
    if asked not in (None, "cpu"):
        raise ValueError(f"{VARIABLE}={asked}; it must be 'cpu' or 'reference'")
    try:
        core = native.kernels()
    except ImportError as error:
        if asked:
            raise
        log.warning("kernels: plain torch, which is slow: %s", error)
        return "reference"
    log.info("kernels: compiled for the CPU, instruction set %s", core.runtime.isa())
    return "cpu"

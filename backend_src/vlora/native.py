"""Access to the compiled kernels, the module `vlora._kernels`, which has a submodule per folder in
csrc/.

The submodule `runtime` contains what the other submodules share: instruction sets, threads and
microbenchmarks.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def kernels() -> Any:
    """Return the compiled module. Raises ImportError, with the reason, if it cannot be loaded."""
    try:
        return importlib.import_module("vlora._kernels")
    except ImportError as error:
        raise ImportError(f"the kernels are not compiled (no compiler at install?): {error}") from (
            error
        )


def spoil_recording() -> None:
    """Mark the recording that this thread makes, if any, as one that must not be repeated.

    A function must call this before it passes kernels the address of memory that is freed after the
    step.
    """
    if kernels.cache_info().currsize:
        kernels().steps.spoil_recording()

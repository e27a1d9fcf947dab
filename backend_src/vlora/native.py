"""Access to the compiled kernels: `vlora._kernels`, with a submodule per folder in csrc/."""

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
    """Mark this thread's recording, if any, as one that must not be repeated.

    Call this before kernels get the address of memory that is freed after the step.
    """
    if kernels.cache_info().currsize:
        kernels().steps.spoil_recording()

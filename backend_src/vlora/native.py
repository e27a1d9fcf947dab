"""Access to the compiled kernels: `vlora._kernels`, with a submodule per folder in csrc/."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from functools import cache
from typing import Any

from vlora.errors import InvalidArgument, shown

# Environment variables that set a backend to "cpu" or "reference".
BACKEND_VARIABLES = ("VLORA_ATMM", "VLORA_KERNELS")


@cache
def kernels() -> Any:
    """Return the compiled module.

    Raises ImportError, with the reason, if it cannot be loaded, and InvalidArgument if VLORA_ISA
    names an instruction set that this CPU lacks.
    """
    try:
        core = importlib.import_module("vlora._kernels")
    except ImportError as error:
        raise ImportError(f"the kernels are not compiled (no compiler at install?): {error}") from (
            error
        )
    try:
        core.runtime.requested_isa()
    except ValueError:
        valid = ", ".join(core.runtime.isas("fp32"))
        raise InvalidArgument(
            f"VLORA_ISA={shown(os.environ['VLORA_ISA'])}; on this CPU it must be auto, twin or one"
            f" of {valid}, or two of them, as in 'avx512,avx2', for fp32 and bf16"
        ) from None
    return core


def check_environment() -> None:
    """Raise InvalidArgument if an environment variable selects kernels that do not exist here."""
    for variable in BACKEND_VARIABLES:
        value = os.environ.get(variable, "cpu")
        if value not in ("cpu", "reference"):
            raise InvalidArgument(
                f"{variable}={shown(value)}; it must be 'cpu' or 'reference', or not set"
            )
    if os.environ.get("VLORA_ISA"):
        with suppress(ImportError):  # Without kernels the variable has no effect.
            kernels()


def spoil_recording() -> None:
    """Mark this thread's recording, if any, as one that must not be repeated.

    Call this before kernels get the address of memory that is freed after the step.
    """
    if kernels.cache_info().currsize:
        kernels().steps.spoil_recording()

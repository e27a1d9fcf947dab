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

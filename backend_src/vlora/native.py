"""The compiled kernels, `vlora._kernels`: a submodule for each directory of csrc/.

`cpu` holds what the others share: the instruction set in use, the threads, microbenchmarks.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def kernels() -> Any:
    """ImportError says why there are none."""
    try:
        return importlib.import_module("vlora._kernels")
    except ImportError as error:
        raise ImportError(f"the kernels are not compiled (no compiler at install?): {error}") from (
            error
        )

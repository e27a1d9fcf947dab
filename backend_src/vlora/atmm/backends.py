"""Which implementation serves the operator: resolved once, logged with its reason."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any, Literal, cast

from vlora import native
from vlora.atmm import tiles

log = logging.getLogger(__name__)

Backend = Literal["cpu", "cuda", "reference"]

VARIABLE = "VLORA_ATMM"
"""Environment variable that names the backend, for tests and for a doubtful machine."""


@cache
def default(device: str = "cpu") -> Backend:
    """The compiled CPU core where it was built, for tensors on a GPU the CUDA library; else the
    reference operator, with one warning."""
    asked = os.environ.get(VARIABLE)
    if device == "cuda" and asked is None:
        return _on_cuda()
    if asked is not None:
        if asked not in ("cpu", "reference"):
            raise ValueError(f"{VARIABLE}={asked}; it must be 'cpu' or 'reference'")
        log.info("ATMM: %s, since %s says so", asked, VARIABLE)
        if asked == "cpu":
            _load_tables()
        return cast(Backend, asked)
    try:
        core = native.kernels()
    except ImportError as error:
        log.warning("ATMM: the reference operator, which is slow: %s", error)
        return "reference"
    for dtype in tiles.DTYPE_NAMES:
        log.info("ATMM: compiled for the CPU, %s by %s", dtype, _measured(core.runtime, dtype))
    _load_tables()
    return "cpu"


def _measured(core: Any, dtype: str) -> str:
    """The instruction set in use, and what each reached: "avx2 (GFLOP/s a core: avx2 103, …)"."""
    peaks = (f"{isa} {core.core_peak(isa, dtype) / 1e9:.0f}" for isa in core.isas(dtype))
    return f"{core.isa(dtype)} (GFLOP/s a core: {', '.join(peaks)})"


def _on_cuda() -> Backend:
    from vlora.atmm.cuda import operator  # knows groups, which know the backends

    try:
        operator.current()
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("ATMM: the reference operator, which is slow: %s", error)
        return "reference"
    return "cuda"


def _load_tables() -> None:
    paths = tiles.load_for_this_cpu()
    if not paths:
        log.info("ATMM: no tile table for this CPU; the built-in tiles serve")
    for path in paths:
        log.info("ATMM: tile table %s", path.name)

"""Choice of the implementation of the LoRA operator ("atmm") and of the step's kernels.

Each choice is made once per process and logged with its reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

from vlora import native
from vlora.atmm import tiles
from vlora.errors import InvalidArgument

log = logging.getLogger(__name__)

Component = Literal["atmm", "kernels"]
# Name of an implementation: "cpu" is the compiled kernels, "cuda" the CUDA library of the LoRA
# operator, "gpu" the GPU kernels of a step, and "reference" plain torch.
Backend = Literal["cpu", "cuda", "gpu", "reference"]
# Environment variables that set a component's backend to "cpu" or "reference". They are for tests,
# and for machines on which the compiled code is suspected of faults.
VARIABLES = dict(zip(get_args(Component), native.BACKEND_VARIABLES, strict=True))
# Names of the components in the log.
LABELS: dict[Component, str] = {"atmm": "ATMM", "kernels": "kernels"}
_chosen: dict[tuple[Component, str], Backend] = {}


def backend_of(
    component: Component, device: str = "cpu", start_cuda: Callable[[], object] | None = None
) -> Backend:
    """Return the backend of `component` for tensors on a torch device type.

    It is "cpu" if the kernels were compiled, "gpu" or, if `start_cuda` succeeds, "cuda" on a GPU,
    else "reference", with a warning. The component's environment variable may set another.

    Raises InvalidArgument for an unknown or unusable name in the variable, and ImportError if it
    selects kernels that were not built.
    """
    chosen = _chosen.get((component, device))
    if chosen is None:
        chosen = _chosen[component, device] = _choose(component, device, start_cuda)
    return chosen


@contextmanager
def override(component: Component, backend: Backend | None) -> Iterator[None]:
    """Use `backend` for `component` on the CPU within the context, in tests; None chooses again."""
    key = (component, "cpu")
    before = _chosen.pop(key, None)
    if backend is not None:
        _chosen[key] = backend
    try:
        yield
    finally:
        _chosen.pop(key, None)
        if before is not None:
            _chosen[key] = before


def _choose(component: Component, device: str, start_cuda: Callable[[], object] | None) -> Backend:
    if component == "kernels" and device == "cuda":
        log.info("kernels: for the GPU, compiled when first launched")
        return "gpu"
    variable = VARIABLES[component]
    requested = os.environ.get(variable)
    native.check_environment()
    if requested == "cpu" and device != "cpu":
        raise InvalidArgument(
            f"{variable}=cpu, but its kernels cannot read the memory of device '{device}'; it must"
            " be 'reference' or not set"
        )
    if requested is not None:
        log.info("%s: backend '%s', set by %s", LABELS[component], requested, variable)
        if requested == "cpu":
            _start_cpu(component, native.kernels())
        return cast(Backend, requested)
    try:
        if device == "cuda" and start_cuda is not None:
            start_cuda()
            return "cuda"
        core = native.kernels()
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("%s: backend 'reference' (plain torch, slow): %s", LABELS[component], error)
        return "reference"
    _start_cpu(component, core)
    return "cpu"


def _start_cpu(component: Component, core: Any) -> None:
    if component == "kernels":
        log.info("kernels: compiled for the CPU, instruction set %s", core.runtime.isa())
        return
    for dtype in tiles.DTYPE_NAMES:
        log.info("ATMM: compiled for the CPU, %s by %s", dtype, _peaks(core.runtime, dtype))
    paths = tiles.load_for_this_cpu()
    if not paths:
        log.info("ATMM: no tile table for this CPU; the built-in tiles are used")
    for path in paths:
        log.info("ATMM: tile table %s", path.name)


def _peaks(runtime: Any, dtype: str) -> str:
    peaks = (f"{isa} {runtime.core_peak(isa, dtype) / 1e9:.0f}" for isa in runtime.isas(dtype))
    return f"{runtime.isa(dtype)} (GFLOP/s per core: {', '.join(peaks)})"

"""Counter of GPU launches: GPU kernels, calls of ATMM, and torch operations other than views."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from vlora.atmm.cuda.library import Library

NO_LAUNCH = {
    "T",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "expand",
    "numpy_T",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}
"""Operations that launch nothing on a GPU."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # A conversion returns the tensor itself if it has the type already.
        converts = name != "to" or result is not args[0]
        if converts and name not in NO_LAUNCH and not self.in_kernel:
            self.names.append(name)
        return result


class EmulatedCounts(ctypes.Structure):
    """The C++ structure emulation::Counts of csrc/atmm/cuda/host/emulation.cuh."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("blocks", "shared_accesses", "warp_counts", "launches")
    )

    @classmethod
    def of(cls, library: Library) -> EmulatedCounts:
        """Return the counts of an emulated library since it was loaded."""
        function = ctypes.CDLL(str(library.path)).vlora_emulated_counts
        function.restype = cls
        counts: EmulatedCounts = function()
        return counts


@contextmanager
def recorded_launches() -> Iterator[list[str]]:
    """Yield the names of all launches in this context, in order. Kernels are interpreted.

    Each launch of ATMM, which is emulated, is named "atmm".
    """
    from triton.runtime.interpreter import GridExecutor

    recorder, run, apply = _Recorder(), GridExecutor.__call__, Library.apply

    def emulate(self: Library, *args: Any) -> None:
        before = EmulatedCounts.of(self).launches
        apply(self, *args)
        recorder.names += ["atmm"] * (EmulatedCounts.of(self).launches - before)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.names.append(self.fn.__name__.removesuffix("_kernel"))
        recorder.in_kernel = True
        try:
            return run(self, *args, **kwargs)
        finally:
            recorder.in_kernel = False

    kernels = patch.object(GridExecutor, "__call__", call)
    with kernels, patch.object(Library, "apply", emulate), recorder:
        yield recorder.names

"""Devices: where weights, pages and rows are stored, and how the inputs of a step get there.

The option `device` selects one `Device` at the start. The other modules allocate memory through it,
and choose kernels by the device of their tensors (`vlora.backends`). So they need no case for any
particular device.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vlora.errors import InvalidArgument, OutOfMemory
from vlora.memory import hugepages
from vlora.memory.available import available_bytes
from vlora.memory.uploads import upload

MIB = 1 << 20
C_COMPILERS = ("gcc", "clang")
"""Programs that the package `triton` looks for if the environment has no CC."""
PageLayout = Literal["panels", "rows"]
"""Layouts of keys and values in a page; see `KVCache`."""


@dataclass(frozen=True)
class Graph:
    """Recorded work of a device.

    replay: runs the work again, on the same memory.
    nbytes: size in bytes of the device memory that the graph takes.
    """

    replay: Callable[[], None]
    nbytes: int


class Readback:
    """Copies of tensors in host memory that may not be complete yet.

    waited: seconds that `get` has waited for them.
    """

    def __init__(
        self, copies: Sequence[torch.Tensor], wait: Callable[[], object] | None = None
    ) -> None:
        """Store the copies.

        wait: function that returns once the copies are complete; None if they are complete.
        """
        self._copies = list(copies)
        self._wait = wait
        self.waited = 0.0

    def get(self) -> list[torch.Tensor]:
        """Return the copies; wait until they are complete."""
        if self._wait is not None:
            started = time.perf_counter()
            self._wait()
            self.waited, self._wait = time.perf_counter() - started, None
        return self._copies


class Device(ABC):
    """Memory of one device, and copies to it.

    name: name in the option `device`.
    torch_device: device of the tensors.
    page_layout: order of keys and values in a page, as the device's attention reads them.
    in_host_memory: whether the CPU can write to the memory.
    commits_lazily: whether memory counts as available until it is first written.
    weight_dtypes: dtypes in which the device can store weights.
    captures_graphs: whether `capture` can record work.
    """

    name: str
    torch_device: torch.device
    page_layout: PageLayout
    in_host_memory: bool
    commits_lazily: bool
    weight_dtypes: tuple[torch.dtype, ...]
    captures_graphs: bool

    @abstractmethod
    def make_current(self) -> None:
        """Make this the device of all work that the calling thread launches.

        The thread that opens the device need not call this; any other thread must, because torch
        has a current device for each thread.
        """

    @abstractmethod
    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros for long-lived data, such as weights or pages.

        Raises OutOfMemory if the device has too little memory.
        """

    @abstractmethod
    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype of the activations between products with weights of this dtype."""

    @abstractmethod
    def upload(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Copy a step's inputs from host memory to the device in one transfer. Return the copies.

        into: memory of the device that receives the copies, uint8; allocated if None. Calls with
            the same `into` and the same shapes and dtypes return tensors at the same addresses.
            Raises ValueError if it is too small.
        """

    @abstractmethod
    def capture(self, work: Callable[[], object]) -> Graph:
        """Record the device's part of `work` without executing it.

        `work` must have run once before. It must not wait for the device or read host memory.
        Raises RuntimeError if it cannot be recorded.
        """

    @abstractmethod
    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        """Queue a copy of tensors to host memory that starts once the device has computed them."""

    @abstractmethod
    def seal(self, tensor: torch.Tensor) -> None:
        """Make a tensor read-only if the device can. Raise OSError if that fails."""

    @abstractmethod
    def available_bytes(self) -> int | None:
        """Return the number of bytes that are left on the device; None if unknown."""


class HostDevice(Device):
    """The CPU. Memory is in huge pages, activations are fp32, and inputs are not copied."""

    name = "cpu"
    torch_device = torch.device("cpu")
    page_layout: PageLayout = "panels"
    in_host_memory = True
    commits_lazily = True
    weight_dtypes = (torch.float32, torch.bfloat16)
    captures_graphs = False

    def make_current(self) -> None:
        """Do nothing, because any thread may compute on the CPU."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return hugepages.hugepage_zeros(*shape, dtype=dtype)

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return torch.float32

    def upload(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        return list(tensors)

    def capture(self, work: Callable[[], object]) -> Graph:
        raise RuntimeError("work of the CPU cannot be captured")

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        return Readback(tensors)

    def seal(self, tensor: torch.Tensor) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(tensor.data_ptr())
        if libc.mprotect(address, ctypes.c_size_t(tensor.nbytes), mmap.PROT_READ):
            error = ctypes.get_errno()
            raise OSError(error, f"mprotect: {os.strerror(error)}")

    def available_bytes(self) -> int | None:
        return available_bytes()


HOST = HostDevice()


class CudaDevice(Device):
    """A GPU. Activations have the dtype of the weights, and inputs are copied from pinned memory.

    Only this class needs a GPU. Tests run all other code for GPUs on CPU tensors.
    """

    page_layout: PageLayout = "rows"
    in_host_memory = False
    commits_lazily = False
    weight_dtypes = (torch.float32, torch.bfloat16, torch.float16)
    captures_graphs = True

    def __init__(self, index: int, share: float = 1.0) -> None:
        """Open the GPU with this number.

        share: maximum share of its memory that this process may allocate.
        """
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.make_current()
        torch.cuda.set_per_process_memory_fraction(share, index)
        # Convolutions of fp32 values would otherwise round them to TF32.
        torch.backends.cudnn.allow_tf32 = False
        self._share = share
        self._graph_pool: Any = None
        self._first_graph: torch.cuda.CUDAGraph | None = None

    def make_current(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            needed = torch.Size(shape).numel() * dtype.itemsize
            raise OutOfMemory(
                f"{needed} bytes for {list(shape)} of {dtype} do not fit device '{self.name}',"
                f" which has {self.available_bytes()} bytes left"
            ) from error

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def upload(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        return upload(tensors, self.torch_device, into)

    def capture(self, work: Callable[[], object]) -> Graph:
        """Record `work` as a CUDA graph.

        All graphs share one pool for the tensors that their work allocates. So such a tensor must
        not be read after the work.
        """
        if self._first_graph is None:
            # torch deletes a pool with its last graph, and cannot capture into it afterwards if
            # cuBLAS still has memory there. This graph is never replayed, and keeps the pool.
            self._graph_pool = torch.cuda.graph_pool_handle()
            self._first_graph = self._captured(lambda: torch.zeros(1, device=self.torch_device))
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(self.torch_device)
        graph = self._captured(work)
        after, _ = torch.cuda.mem_get_info(self.torch_device)
        return Graph(graph.replay, max(0, before - after))

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.torch_device)
        try:
            # Other threads may copy to the GPU meanwhile.
            with torch.cuda.graph(graph, self._graph_pool, capture_error_mode="thread_local"):
                work()
        finally:
            # torch leaves the stream of the capture current if the capture ends with an error.
            torch.cuda.set_stream(stream)
        return graph

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return Readback(copies, event.synchronize)

    def seal(self, tensor: torch.Tensor) -> None:
        """Do nothing, because a process cannot make memory of a GPU read-only."""

    def available_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        unused = reserved - torch.cuda.memory_allocated(self.torch_device)
        return max(0, min(free, int(total * self._share) - reserved) + unused)


def open_device(name: str, share: float = 1.0) -> Device:
    """Return the device for the option `device`: "cpu", "cuda", "cuda:N" or "auto".

    share: maximum share of a GPU's memory that this process may allocate.

    "auto" is the first GPU, or the CPU if no GPU can be used. Raises InvalidArgument, with the
    reason, for a GPU that cannot be used.
    """
    if name == "cpu":
        return HOST
    reason = why_no_gpu(name)
    if reason is None:
        return CudaDevice(int(name.partition(":")[2] or 0), share)
    if name == "auto":
        return HOST
    raise InvalidArgument(f"'device' = '{name}', but {reason}; use \"cpu\" or \"auto\"")


def why_no_gpu(name: str) -> str | None:
    """Return why the GPU with this name cannot be used; None if it can."""
    if not torch.version.cuda:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "this machine has no GPU that torch can use"
    index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        return f"this machine has {count} GPUs, numbered from 0"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"the package 'triton', in which the GPU kernels are written, is missing: {error}"
    if not (os.environ.get("CC") or any(map(shutil.which, C_COMPILERS))):
        return (
            "the package 'triton' needs a C compiler for its launcher, and there is none; install"
            f" {' or '.join(C_COMPILERS)}, or set CC"
        )
    return None


def require_dtype(device: Device, dtype: torch.dtype) -> None:
    """Raise InvalidArgument unless the device can store weights of this dtype."""
    if dtype not in device.weight_dtypes:
        known = ", ".join(str(one).removeprefix("torch.") for one in device.weight_dtypes)
        raise InvalidArgument(
            f"'dtype' = '{str(dtype).removeprefix('torch.')}' cannot be used on device"
            f" '{device.name}', which supports {known}; float16 needs a GPU (option 'device')"
        )


def require_memory(device: Device, parts: Mapping[str, int], advice: str) -> None:
    """Raise OutOfMemory, with all figures, unless the parts fit the memory that a device has left.

    A device that commits memory lazily is not checked.

    parts: description of each part → its size in bytes.
    advice: imperative that says which options to change.
    """
    left, needed = device.available_bytes(), sum(parts.values())
    if device.commits_lazily or left is None or needed <= left:
        return
    listed = ", ".join(f"{part} {size / MIB:.1f} MiB" for part, size in parts.items())
    raise OutOfMemory(
        f"device '{device.name}' has {left / MIB:.1f} MiB left, but {needed / MIB:.1f} MiB are"
        f" needed: {listed}; {advice}"
    )

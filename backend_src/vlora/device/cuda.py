"""The GPU as a device of the engine, and the choice of a device by the option `device`."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sysconfig
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vlora.device.device import HOST, Device, Graph, Load, PageLayout, Readback, upload
from vlora.errors import InvalidArgument, OutOfMemory

# Programs that the package `triton` looks for if the environment has no CC.
C_COMPILERS = ("gcc", "clang")
# Maximum number of loads under way, which bounds the pinned memory that they need. An adapter has
# one load per group of projections, and a layer has four groups.
MAX_LOADS = 16


class CudaDevice(Device):
    """A GPU, number `index`, of whose memory this process allocates at most the given share.

    Activations have the dtype of the weights, and inputs are copied from pinned memory. Only this
    class needs a GPU. Tests run all other code for GPUs on CPU tensors.
    """

    page_layout: PageLayout = "rows"
    in_host_memory = False
    commits_lazily = False
    weight_dtypes = (torch.float32, torch.bfloat16, torch.float16)
    captures_graphs = True

    def __init__(self, index: int, share: float = 1.0) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.make_current()
        torch.cuda.set_per_process_memory_fraction(share, index)
        # Convolutions of fp32 values would otherwise round them to TF32.
        torch.backends.cudnn.allow_tf32 = False
        self._share = share
        self._graph_pool: Any = None
        self._first_graph: torch.cuda.CUDAGraph | None = None
        # Graphs whose capture has failed, which torch may still refer to.
        self._invalid_graphs: list[torch.cuda.CUDAGraph] = []
        self._load_stream, self._capture_stream = (
            torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        # Events of the last loads, which may be under way.
        self._loads: deque[torch.cuda.Event] = deque()

    def make_current(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            needed = torch.Size(shape).numel() * dtype.itemsize
            what = f"{needed} bytes for {list(shape)} of {dtype}"
            raise OutOfMemory(self._too_little(what)) from error

    def _too_little(self, what: str) -> str:
        left = self.available_bytes()
        return f"{what} do not fit device '{self.name}', which has {left} bytes left"

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def upload(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        return upload(tensors, self.torch_device, into)

    def load(self, tensors: Sequence[torch.Tensor]) -> Load:
        # Any thread may load. When the stream is left, torch makes the thread's former device
        # current again, and creates a context there if it is another GPU.
        self.make_current()
        if len(self._loads) >= MAX_LOADS:
            self._loads.popleft().synchronize()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        needed = sum(tensor.nbytes for tensor in tensors)
        try:
            with torch.cuda.stream(self._load_stream):
                copies = upload(tensors, self.torch_device)
                event.record(self._load_stream)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(self._too_little(f"{needed} bytes")) from error
        except torch.AcceleratorError as error:
            # Only the allocator of the device has an exception for too little memory.
            if "out of memory" not in str(error):
                raise
            raise OutOfMemory(f"{needed} bytes do not fit pinned host memory") from error
        # The memory belongs to the stream of loads. Without `record_stream`, a load could get the
        # memory of released copies while steps still read them.
        copies[0].record_stream(torch.cuda.default_stream(self.torch_device))
        self._loads.append(event)
        return Load(copies, lambda: torch.cuda.current_stream(self.torch_device).wait_event(event))

    def capture(self, work: Callable[[], object]) -> Graph:
        # All graphs share one pool, so nothing may read a tensor that `work` allocates afterwards.
        if self._first_graph is None:
            # torch deletes a pool with its last graph, and cannot capture into it afterwards if
            # cuBLAS still has memory there. This graph is never replayed, and keeps the pool.
            self._graph_pool = torch.cuda.graph_pool_handle()
            self._first_graph = self._captured(lambda: torch.zeros(1, device=self.torch_device))
        before = self._graph_bytes()
        return Graph(self._captured(work).replay, self._graph_bytes() - before)

    def _graph_bytes(self) -> int:
        # Only captures allocate memory in the pool of graphs.
        segments = torch.cuda.memory_snapshot(self._graph_pool)  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments)

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.torch_device)
        try:
            # Other threads may copy to the GPU meanwhile. torch's own stream of captures belongs to
            # the first device that has captured.
            with torch.cuda.graph(
                graph, self._graph_pool, self._capture_stream, capture_error_mode="thread_local"
            ):
                work()
        except BaseException:
            # After an invalid capture, torch's allocators wait for its end forever. The device's
            # allocator would never again use memory that two streams have used. The call fails if
            # the capture has ended properly.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.torch_device.index, self._graph_pool)
            # The allocator of pinned memory keeps a pointer to the graph, and cannot use the pool
            # again.
            self._invalid_graphs.append(graph)
            self._graph_pool = self._first_graph = None
            raise
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
    """Return the device for the option `device`: "cpu", "cuda", "cuda:N" or "auto", which is the
    first GPU, or else the CPU. Raises InvalidArgument for a GPU that cannot be used.

    share: maximum share of a GPU's memory that this process may allocate.
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
        remedy = f"install {' or '.join(C_COMPILERS)}, or set CC"
        return (
            f"the package 'triton' needs a C compiler for its launcher, and there is none; {remedy}"
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme)["include"])
    given = any(variable in os.environ for variable in ("CPATH", "C_INCLUDE_PATH"))
    if not given and not (headers / "Python.h").is_file():
        missing = f"compiles its launcher with Python.h, which is not in {headers}"
        remedy = "install Python's headers (Debian: python3-dev)"
        return f"the package 'triton' {missing}; {remedy}"
    return None

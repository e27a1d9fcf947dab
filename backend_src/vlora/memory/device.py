"""Devices: where weights, pages and rows are stored, and how the inputs of a step get there.

The option `device` selects one `Device` at the start. The other modules allocate memory through it,
and choose kernels by the device of their tensors (`vlora.backends`). So they need no case for any
particular device.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from vlora.errors import InvalidArgument
from vlora.memory import hugepages
from vlora.memory.available import available_bytes

PageLayout = Literal["panels", "rows"]
"""Layouts of keys and values in a page; see `KVCache`."""

ALIGNMENT = 16
"""Alignment in bytes of each tensor within an upload."""


class Readback:
    """Copies of tensors in host memory, which may still be under way.

    waited: seconds that `get` has waited for them.
    """

    def __init__(
        self, copies: Sequence[torch.Tensor], wait: Callable[[], object] | None = None
    ) -> None:
        """wait: returns once the copies are complete; None if they are already."""
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
    """

    name: str
    torch_device: torch.device
    page_layout: PageLayout
    in_host_memory: bool

    @abstractmethod
    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros that is kept for long, such as weights or pages.

        Raises InvalidArgument if the device has too little memory.
        """

    @abstractmethod
    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the type of rows between products with weights of this type."""

    @abstractmethod
    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the device of a step's inputs, which are in host memory.

        All of them are copied in one transfer.
        """

    @abstractmethod
    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        """Start to copy tensors to host memory once the device has computed them."""

    @abstractmethod
    def seal(self, tensor: torch.Tensor) -> None:
        """Make a tensor read-only if the device can. Raise OSError if that fails."""

    @abstractmethod
    def available_bytes(self) -> int | None:
        """Return the number of bytes that are left on the device; None if unknown."""


class HostDevice(Device):
    """The CPU: memory is in huge pages, rows are fp32, and inputs are used without copying."""

    name = "cpu"
    torch_device = torch.device("cpu")
    page_layout: PageLayout = "panels"
    in_host_memory = True

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return hugepages.hugepage_zeros(*shape, dtype=dtype)

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return torch.float32

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

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
    """A GPU: rows have the type of the weights, and inputs are copied from pinned memory.

    Only this class needs a GPU. Tests run all other code for GPUs on CPU tensors.
    """

    page_layout: PageLayout = "rows"
    in_host_memory = False

    def __init__(self, index: int) -> None:
        """Open the GPU with this number."""
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            needed = torch.Size(shape).numel() * dtype.itemsize
            raise InvalidArgument(
                f"{needed} bytes for {list(shape)} of {dtype} do not fit device '{self.name}',"
                f" which has {self.available_bytes()} bytes left; reduce 'kv_cache_tokens' or"
                " 'merged_weights_bytes'"
            ) from error

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return upload(tensors, self.torch_device)

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Readback(copies, event.synchronize)

    def seal(self, tensor: torch.Tensor) -> None:
        """Do nothing, because a process cannot make memory of a GPU read-only."""

    def available_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])


def open_device(name: str) -> Device:
    """Return the device for the option `device`: "cpu", "cuda", "cuda:N" or "auto".

    "auto" is the first GPU, or the CPU if no GPU can be used. Raises InvalidArgument, with the
    reason, for a GPU that cannot be used.
    """
    if name == "cpu":
        return HOST
    reason = why_no_gpu(name)
    if reason is None:
        return CudaDevice(int(name.partition(":")[2] or 0))
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
    return None


def upload(tensors: Sequence[torch.Tensor], to: torch.device) -> list[torch.Tensor]:
    """Return copies of tensors in host memory on a device, made in one transfer."""
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=to.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        packed[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
    copied = packed.to(to, non_blocking=True)
    return [
        copied[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


class UploadedPart(Protocol):
    """Part of a step with inputs on the device."""

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors to upload, in host memory."""

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Set the copies of `inputs` on the device."""


def upload_step(
    device: Device, tensors: Sequence[torch.Tensor], *parts: UploadedPart
) -> list[torch.Tensor]:
    """Upload `tensors` and the inputs of all parts in one transfer; return the copies of `tensors`.

    Each part gets the copies of its inputs by `place`.
    """
    inputs = [part.inputs for part in parts]
    uploaded = device.upload([*tensors, *itertools.chain.from_iterable(inputs)])
    rest = iter(uploaded[len(tensors) :])
    for part, its_inputs in zip(parts, inputs, strict=True):
        part.place(list(itertools.islice(rest, len(its_inputs))))
    return uploaded[: len(tensors)]

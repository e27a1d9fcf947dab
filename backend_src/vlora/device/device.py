"""Devices: where weights, pages and rows are stored, and how the inputs of a step get there.

The option `device` selects one. Other modules allocate memory through it, and choose kernels by the
device of their tensors (`vlora.backends`), so they need no case for any device.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from vlora.device import host_memory
from vlora.device.host_memory import available_bytes
from vlora.errors import InvalidArgument, OutOfMemory

MIB = 1 << 20
ALIGNMENT = 16  # Alignment in bytes of each tensor within an upload.
PageLayout = Literal["panels", "rows"]  # Layouts of keys and values in a page; see `KVCache`.


@dataclass(frozen=True)
class Graph:
    """Recorded work of a device. `replay` runs it again, on the same memory; `nbytes` is the memory
    that its tensors take beyond what earlier graphs share.
    """

    replay: Callable[[], None]
    nbytes: int


@dataclass(frozen=True)
class Load:
    """Copies of tensors on a device, which may still be under way. `wait` lets all work that the
    calling thread launches from now on wait for them, but not the thread itself.
    """

    tensors: list[torch.Tensor]
    wait: Callable[[], object]


class Readback:
    """Copies of a device's tensors to host memory. `wait` returns once they are complete; `waited`
    is the number of seconds that `get` has waited for them.
    """

    def __init__(
        self, copies: Sequence[torch.Tensor], wait: Callable[[], object] | None = None
    ) -> None:
        self._copies = list(copies)
        self._wait = wait
        self.waited = 0.0

    def get(self) -> list[torch.Tensor]:
        if self._wait is not None:
            started = time.perf_counter()
            self._wait()
            self.waited, self._wait = time.perf_counter() - started, None
        return self._copies


class Device:
    """Memory of one device, and copies to it. This class is the CPU; a GPU overrides all methods.

    On the CPU, memory is in huge pages, activations are fp32, and inputs are not copied.

    page_layout: order of keys and values in a page, as the device's attention reads them.
    in_host_memory: whether the CPU can write to the memory.
    commits_lazily: whether memory counts as available until it is first written.
    weight_dtypes: dtypes in which the device can store weights.
    captures_graphs: whether `capture` can record work.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    page_layout: PageLayout = "panels"
    in_host_memory = True
    commits_lazily = True
    weight_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    captures_graphs = False

    def make_current(self) -> None:
        """Make this the device of all work that the calling thread launches. Each thread but the
        one that opened the device must call this.
        """

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros for long-lived data, such as weights or pages. Raises OutOfMemory."""
        return host_memory.hugepage_zeros(*shape, dtype=dtype)

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype of the activations between products with weights of this dtype."""
        return torch.float32

    def upload(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Copy a step's inputs from host memory to the device in one transfer. Return the copies.

        into: uint8 memory for the copies, allocated if None. With the same `into`, shapes and
            dtypes, they have the same addresses. Raises ValueError if it is too small.
        """
        return list(tensors)

    def load(self, tensors: Sequence[torch.Tensor]) -> Load:
        """Begin to copy long-lived data, at least one tensor, from host memory to the device, while
        it computes. Return the copies. Any thread may call this, and may wait for an earlier load.

        The memory of a released copy is used again only after the work that was launched before the
        release. Raises OutOfMemory.
        """
        return Load(list(tensors), lambda: None)

    def capture(self, work: Callable[[], object]) -> Graph:
        """Call `work`, and return a recording of what it launches, which is not executed yet.

        `work` must have run once, and must neither wait for the device nor read host memory. Raises
        RuntimeError if recording fails.
        """
        raise RuntimeError("work of the CPU cannot be captured")

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        """Begin to copy tensors to host memory once they are computed. Return the copies."""
        return Readback(tensors)

    def seal(self, tensor: torch.Tensor) -> None:
        """Make a tensor read-only if the device can. Raise OSError if that fails."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(tensor.data_ptr())
        if libc.mprotect(address, ctypes.c_size_t(tensor.nbytes), mmap.PROT_READ):
            error = ctypes.get_errno()
            raise OSError(error, f"mprotect: {os.strerror(error)}")

    def available_bytes(self) -> int | None:
        """Return the number of bytes that are left on the device; None if unknown."""
        return available_bytes()


HOST = Device()


def require_dtype(device: Device, dtype: torch.dtype) -> None:
    """Raise InvalidArgument unless the device can store weights of this dtype."""
    if dtype not in device.weight_dtypes:
        name, *known = (str(one).removeprefix("torch.") for one in (dtype, *device.weight_dtypes))
        supported = f"which supports {', '.join(known)}; float16 needs a GPU (option 'device')"
        raise InvalidArgument(
            f"'dtype' = '{name}' cannot be used on device '{device.name}', {supported}"
        )


def require_memory(device: Device, parts: Mapping[str, int], advice: str) -> None:
    """Raise OutOfMemory, which lists all parts, unless they fit the memory that a device has left,
    or the device commits memory lazily.

    parts: description of each part → its size in bytes.
    advice: imperative that says which options to change.
    """
    left, needed = device.available_bytes(), sum(parts.values())
    if device.commits_lazily or left is None or needed <= left:
        return
    listed = ", ".join(f"{part} {size / MIB:.1f} MiB" for part, size in parts.items())
    lack = f"{left / MIB:.1f} MiB left, but {needed / MIB:.1f} MiB are needed"
    raise OutOfMemory(f"device '{device.name}' has {lack}: {listed}; {advice}")


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def upload(
    tensors: Sequence[torch.Tensor], to: torch.device, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Copy tensors from host memory to a device in one transfer, as `Device.upload` does."""
    sizes = (packed_bytes([tensor]) for tensor in tensors)
    *starts, size = itertools.accumulate(sizes, initial=0)
    if into is not None and size > len(into):
        raise ValueError(f"an upload of {size} bytes does not fit {len(into)} bytes")
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=to.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        packed[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
    copied = torch.empty(size, dtype=torch.uint8, device=to) if into is None else into
    copied[:size].copy_(packed, non_blocking=True)
    return [
        copied[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


class UploadedPart(Protocol):
    """Part of a step whose inputs are uploaded to the device."""

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors to upload, in host memory."""

    def place(self, uploaded: Sequence[torch.Tensor]) -> None:
        """Store the copies of `inputs` that were made on the device."""


def upload_step(
    device: Device,
    tensors: Sequence[torch.Tensor],
    *parts: UploadedPart,
    into: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Upload `tensors` and the inputs of all parts in one transfer, as `Device.upload` does; return
    the copies of `tensors`.
    """
    inputs = [part.inputs for part in parts]
    uploaded = device.upload([*tensors, *itertools.chain.from_iterable(inputs)], into)
    rest = iter(uploaded[len(tensors) :])
    for part, its_inputs in zip(parts, inputs, strict=True):
        part.place(list(itertools.islice(rest, len(its_inputs))))
    return uploaded[: len(tensors)]

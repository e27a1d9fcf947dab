"""A fake GPU: CPU tensors that are otherwise treated like those of a GPU."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import numpy as np
import torch

from tests.support.device_tensors import DEVICE, OnDevice, separate_devices, unseparated
from tests.support.recorded_work import POISON, Record
from vlora import backends
from vlora.device.device import Device, Graph, Load, PageLayout, Readback, packed_bytes, upload

GRAPH_BYTES = 1000
"""Memory that a graph of the fake device claims to take."""


class FakeDevice(Device):
    """A device of CPU tensors with the pages, row type and uploads of a GPU.

    The memory of a released tensor contains NaN and is not used again. So work that still reads it
    gives a wrong result.

    events: "upload" for each copy of a step's inputs, "read" when results begin to be copied
        back, and "wait" when the engine waits for them.
    loads: number of loads that were started. A load is copied when it or a later one is waited for;
        until then, its copies contain NaN.
    loaded: number of loads that were copied.
    graph_events: "capture" and "replay" for each graph that is captured or replayed.
    """

    name = "fake"
    torch_device = DEVICE
    page_layout: PageLayout = "rows"
    in_host_memory = False
    commits_lazily = False
    weight_dtypes = (torch.float32, torch.float16)  # The interpreter multiplies bf16 wrongly.
    captures_graphs = True

    def __init__(self) -> None:
        self.memory: int | None = None
        """Bytes that the device claims to have left; None if unknown."""
        self.events: list[str] = []
        self.graph_events: list[str] = []
        self.loads = self.loaded = 0
        self._loading: deque[Callable[[], object]] = deque()
        """Copies of the loads under way, in the order of the stream of loads."""
        self._memory: list[np.ndarray] = []
        """All memory that was ever allocated."""
        self._lock = threading.Lock()
        self.threads = {threading.get_ident()}
        """Threads of which this is the current device."""

    def make_current(self) -> None:
        self.threads.add(threading.get_ident())

    def _check_thread(self) -> None:
        assert threading.get_ident() in self.threads, "another device is this thread's current one"

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        zeros = self._allocate(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(shape)
        return zeros.as_subclass(OnDevice)

    def _allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes that contain NaN. They do so again once no tensor uses them."""
        self._check_thread()
        memory = torch.full((size,), POISON, dtype=torch.uint8).numpy()
        self._memory.append(memory)
        # Every tensor that uses the memory keeps this view of it.
        view = memory.view()
        weakref.finalize(view, memory.fill, POISON).atexit = False
        return torch.from_numpy(view)

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def upload(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        self._check_thread()
        self.events.append("upload")
        if into is None:
            into = self._allocate(packed_bytes(tensors))
        return [copy.as_subclass(OnDevice) for copy in upload(tensors, self.torch_device, into)]

    def load(self, tensors: Sequence[torch.Tensor]) -> Load:
        self.make_current()  # Any thread may load, as on a GPU.
        packed = self._allocate(packed_bytes(tensors))
        copies = upload(tensors, self.torch_device, packed)
        source = packed.clone()
        packed.fill_(POISON)

        def copy() -> None:
            packed.copy_(source)

        with self._lock:
            self.loads += 1
            number = self.loads
            self._loading.append(copy)

        def wait() -> None:
            self._check_thread()
            with self._lock, torch._C.DisableTorchFunction():
                while self.loaded < number:
                    self._loading.popleft()()
                    self.loaded += 1

        return Load([one.as_subclass(OnDevice) for one in copies], wait)

    def capture(self, work: Callable[[], object]) -> Graph:
        """Return a graph that executes the work again.

        The capture itself changes no memory. A replay raises AssertionError if the work would now
        launch other calls than at its capture. After both, the tensors that the work has allocated
        contain no results.
        """
        self._check_thread()
        self.graph_events.append("capture")
        captured = Record.of(work, undo=True)

        def replay() -> None:
            self._check_thread()
            self.graph_events.append("replay")
            replayed = Record.of(work)
            for now, before in itertools.zip_longest(replayed, captured):
                assert now == before, "a graph would launch what was captured, which has changed"

        return Graph(replay, GRAPH_BYTES)

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        self._check_thread()
        self.events.append("read")
        copies = [torch.full(tensor.shape, -1, dtype=tensor.dtype) for tensor in tensors]

        def wait() -> None:
            # The results arrive no sooner, so that reading them without waiting would fail.
            self.events.append("wait")
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)

        return Readback(copies, wait)

    def seal(self, tensor: torch.Tensor) -> None:
        pass

    def available_bytes(self) -> int | None:
        return self.memory


@contextmanager
def fake_gpu() -> Iterator[FakeDevice]:
    """Yield a fake device. Engines made in this context use it. The interpreted GPU kernels then
    process all CPU tensors. On this thread, tensors of the device and of the host are separate.
    """
    device = FakeDevice()
    with ExitStack() as stack:
        if backends.backend_of("atmm") == "cpu":  # The compiled core cannot read a GPU's memory.
            stack.enter_context(backends.override("atmm", "reference"))
        stack.enter_context(backends.override("kernels", "gpu"))
        stack.enter_context(patch("vlora.engine.parts.engine_device", return_value=device))
        if find_spec("triton") is not None:
            from triton.runtime.interpreter import GridExecutor

            run = unseparated(GridExecutor.__call__)
            stack.enter_context(patch.object(GridExecutor, "__call__", run))
        stack.enter_context(separate_devices())
        yield device

"""A fake GPU: CPU tensors that are otherwise treated like those of a GPU."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import torch

from tests.support.device_tensors import DEVICE, OnDevice, separate_devices, unseparated
from tests.support.recorded_work import POISON, Record
from vlora import backends
from vlora.memory.device import Device, Graph, Load, PageLayout, Readback
from vlora.memory.uploads import upload

GRAPH_BYTES = 1000
"""Memory that a graph of the fake device claims to take."""


class FakeDevice(Device):
    """A device of CPU tensors with the pages, row type and uploads of a GPU.

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
        self._lock = threading.Lock()
        self.threads = {threading.get_ident()}
        """Threads of which this is the current device."""

    def make_current(self) -> None:
        self.threads.add(threading.get_ident())

    def _check_thread(self) -> None:
        assert threading.get_ident() in self.threads, "another device is this thread's current one"

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self._check_thread()
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    def row_dtype(self, weights: torch.dtype) -> torch.dtype:
        return weights

    def upload(
        self, tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        self._check_thread()
        self.events.append("upload")
        return upload(tensors, self.torch_device, into)

    def load(self, tensors: Sequence[torch.Tensor]) -> Load:
        copies = [torch.empty_like(tensor) for tensor in tensors]
        sources = [tensor.clone() for tensor in tensors]

        def copy() -> None:
            for target, source in zip(copies, sources, strict=True):
                target.copy_(source)

        for target in copies:
            target.view(torch.uint8).fill_(POISON)
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

        return Load([target.as_subclass(OnDevice) for target in copies], wait)

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

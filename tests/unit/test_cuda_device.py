"""Tests of a GPU as a device, with stand-ins for the functions of torch that need a GPU."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from vlora.adapters.errors import as_adapter_error, is_transient
from vlora.config import Options
from vlora.device import cuda as devices
from vlora.device.cuda import CudaDevice, open_device
from vlora.device.device import HOST
from vlora.engine.parts import engine_device
from vlora.errors import InvalidArgument, OutOfMemory

EMPTY = torch.empty


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_an_error_that_says_so(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'device' = '{name}', but (torch|this machine)"):
        open_device(name)
    assert open_device("auto") is HOST
    assert open_device("cpu") is HOST


def test_reasons_against_a_gpu_are_checked_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in str(devices.why_no_gpu("auto"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.why_no_gpu("cuda") == "this machine has no GPU that torch can use"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.why_no_gpu("cuda:2") == "this machine has 2 GPUs, numbered from 0"
    found = Mock(side_effect=ImportError("No module named 'triton'"))
    monkeypatch.setattr(devices.importlib, "import_module", found)
    assert "'triton', in which the GPU kernels are written" in str(devices.why_no_gpu("cuda:1"))
    found.side_effect = None
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(devices.shutil, "which", lambda program: None)
    assert "install gcc or clang, or set CC" in str(devices.why_no_gpu("cuda:1"))
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.delenv("CPATH", raising=False)
    monkeypatch.delenv("C_INCLUDE_PATH", raising=False)
    monkeypatch.setattr(devices.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert f"Python.h, which is not in {tmp_path}" in str(devices.why_no_gpu("cuda:1"))
    monkeypatch.setenv("CPATH", "/opt/include")
    assert devices.why_no_gpu("cuda:1") is None
    monkeypatch.delenv("CPATH")
    (tmp_path / "Python.h").touch()
    assert devices.why_no_gpu("cuda:1") is None


class FakeEvent:
    """Stand-in for `torch.cuda.Event`. `recorded` is the stream that it was last recorded on."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.recorded, self.awaited = cuda, "", False
        cuda.events.append(self)

    def record(self, stream: FakeStream | str) -> None:
        self.recorded = getattr(stream, "name", stream)

    def synchronize(self) -> None:
        assert self.recorded, "an event that was never recorded"
        self.awaited = True


@dataclass(frozen=True)
class FakeStream:
    """Stand-in for `torch.cuda.Stream`."""

    cuda: FakeCuda
    name: str

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append((self.name, "waits for", event.recorded))


class FakeCuda:
    """Stand-in for the functions of `torch.cuda` that a `CudaDevice` calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory_is_full = False
        self.free, self.total, self.reserved, self.allocated = 50, 100, 20, 15
        self.stream = "main"
        self.events: list[FakeEvent] = []
        self.calls: list[tuple[object, ...]] = []
        self.segments: dict[str, list[int]] = {"pool": [3]}
        """Sizes of the segments of memory of each pool of graphs."""
        functions = {
            "set_device": lambda device: self.calls.append(("device", device.index)),
            "set_per_process_memory_fraction": lambda share, index: self.calls.append(
                ("share", share, index)
            ),
            "mem_get_info": lambda device: (self.free, self.total),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "memory_snapshot": lambda pool: [{"total_size": n} for n in self.segments[pool]],
            "graph_pool_handle": lambda: self.calls.append(("pool",)) or "pool",
            "CUDAGraph": Mock,
            "graph": self._graph,
            "current_stream": lambda device: FakeStream(self, self.stream),
            "default_stream": lambda device: "main",
            "Stream": lambda device: f"stream of {device}",
            "Event": lambda: FakeEvent(self),
            "stream": self._stream,
            "set_stream": lambda stream: setattr(self, "stream", stream.name),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch, "empty", self._empty)
        monkeypatch.setattr(
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: self.calls.append(("kept for", stream)),
        )

    def _empty(
        self, *args: Any, device: Any = "cpu", pin_memory: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Return memory of the host in place of that of a GPU."""
        if torch.device(device).type == "cuda":
            self.calls.append(("allocate on", self.stream))
            if self.memory_is_full:
                raise torch.OutOfMemoryError("CUDA out of memory")
        elif pin_memory:
            self.calls.append(("pin",))
        return EMPTY(*args, **kwargs)

    @contextmanager
    def _stream(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _graph(
        self, graph: object, pool: object, stream: str, capture_error_mode: str
    ) -> Iterator[None]:
        self.calls.append(("capture", pool, stream, capture_error_mode))
        self.stream = "of the capture"
        yield
        self.stream = "main"


def test_a_process_takes_no_more_than_its_share_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(devices, "why_no_gpu", lambda name: None)
    gpu = engine_device(Options(model=tmp_path, device="cuda:2", engine_memory_share=0.6))
    assert cuda.calls == [("device", 2), ("share", 0.6, 2)]
    # 40 of the share are not reserved yet, and 5 of the reserved bytes are not in use.
    assert gpu.available_bytes() == 45
    cuda.free = 30
    assert gpu.available_bytes() == 35
    cuda.reserved = cuda.allocated = 70
    assert gpu.available_bytes() == 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def gpu(cuda: FakeCuda) -> CudaDevice:
    """Return a device with half of the memory of GPU 1."""
    device = CudaDevice(1, 0.5)
    cuda.calls.clear()
    return device


def test_graphs_share_a_pool_that_outlives_them(
    cuda: FakeCuda, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "zeros", Mock())
    allocated = []

    def work() -> None:
        assert cuda.stream == "of the capture"
        allocated.append(cuda.free)
        cuda.segments["pool"].append(7)
        cuda.free -= 7 + 20  # Another thread loads an adapter meanwhile.

    graph = gpu.capture(work)
    assert graph.nbytes == 7
    assert len(allocated) == 1
    # One graph is never released: torch deletes a pool with its last graph.
    captures = [("capture", "pool", "stream of cuda:1", "thread_local")] * 2
    assert cuda.calls == [("pool",), *captures]
    del graph
    gc.collect()
    gpu.capture(work)
    assert cuda.calls == [("pool",), *captures, captures[0]]


def test_a_failed_capture_leaves_the_stream_of_the_thread_as_it_was(
    cuda: FakeCuda, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "zeros", Mock())
    work = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    end = Mock(side_effect=RuntimeError("endAllocatePool: not currently recording to mempool_id"))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    with pytest.raises(RuntimeError, match="not permitted"):
        gpu.capture(work)
    assert cuda.stream == "main"
    # torch's allocators would otherwise wait for the end of the capture.
    end.assert_called_once_with(1, "pool")
    cuda.calls.clear()
    gpu.capture(lambda: None)
    assert cuda.calls[0] == ("pool",), "a later capture has another pool"


def test_inputs_of_a_step_reach_a_gpu_from_pinned_memory(cuda: FakeCuda, gpu: CudaDevice) -> None:
    tensors = [torch.arange(3), torch.rand(2, 2)]
    assert all(map(torch.equal, gpu.upload(tensors), tensors))
    assert cuda.calls == [("pin",), ("allocate on", "main")]
    cuda.calls.clear()
    into = EMPTY(64, dtype=torch.uint8)
    assert all(map(torch.equal, gpu.upload(tensors, into), tensors))
    assert cuda.calls == [("pin",)]


def test_rows_of_a_gpu_have_the_type_of_the_weights(gpu: CudaDevice) -> None:
    assert [gpu.row_dtype(dtype) for dtype in gpu.weight_dtypes] == list(gpu.weight_dtypes)
    gpu.seal(torch.zeros(1))


def test_results_of_a_gpu_are_read_after_their_event(cuda: FakeCuda, gpu: CudaDevice) -> None:
    results = [torch.arange(3), torch.tensor([True])]
    copies = gpu.read_back(results)
    (event,) = cuda.events
    assert event.recorded == "main"
    assert not event.awaited
    assert all(map(torch.equal, copies.get(), results))
    assert event.awaited
    assert copies.waited > 0
    assert cuda.calls == [("pin",)] * 2


def test_adapters_are_loaded_on_a_stream_of_their_own(cuda: FakeCuda, gpu: CudaDevice) -> None:
    tensors = [torch.rand(4, 3), torch.rand(2, 4)]
    load = gpu.load(tensors)
    assert all(map(torch.equal, load.tensors, tensors))
    # The thread may not have used this GPU before.
    allocation = ("allocate on", "stream of cuda:1")
    assert cuda.calls == [("device", 1), ("pin",), allocation, ("kept for", "main")]
    assert cuda.stream == "main"
    load.wait()
    assert cuda.calls[-1] == ("main", "waits for", "stream of cuda:1")
    # The host has not waited for any load.
    assert not any(event.awaited for event in cuda.events)


def test_the_pinned_memory_of_loads_is_bounded(
    cuda: FakeCuda, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "MAX_LOADS", 3)
    for number in range(1, 6):
        gpu.load([torch.zeros(1)])
        assert [event.awaited for event in cuda.events].count(True) == max(0, number - 3)
    assert [event.awaited for event in cuda.events] == [True, True, False, False, False]


def test_memory_that_does_not_fit_a_gpu_is_a_typed_error_with_figures(
    cuda: FakeCuda, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.zeros(20)]
    cuda.memory_is_full = True
    with pytest.raises(OutOfMemory, match=r"80 bytes do not fit .*, which has 35") as error:
        gpu.load(tensors)
    # Memory may be free later.
    assert is_transient(error.value)
    assert re.search("adapter 'a'.* 35 bytes left", str(as_adapter_error("a", Path(), error.value)))
    assert cuda.stream == "main"
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=torch.OutOfMemoryError("no")))
    with pytest.raises(OutOfMemory, match=r"96 bytes for \[3, 8\].* 'cuda:1', which has 35 bytes"):
        gpu.zeros(3, 8, dtype=torch.float32)
    pin = Mock(side_effect=torch.AcceleratorError("CUDA error: out of memory"))
    monkeypatch.setattr(torch, "empty", pin)
    with pytest.raises(OutOfMemory, match="80 bytes do not fit pinned host memory"):
        gpu.load(tensors)
    pin.side_effect = torch.AcceleratorError("CUDA error: an illegal memory access")
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        gpu.load(tensors)

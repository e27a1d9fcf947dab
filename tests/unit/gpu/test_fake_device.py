"""Tests of the fake GPU: it finds uses of memory, threads and graphs that fail on a real one."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.support.fake_device import fake_gpu
from vlora.device.device import HOST

pytestmark = pytest.mark.usefixtures("launch")


def test_a_graph_of_the_fake_device_has_no_results_and_is_refused_once_it_is_stale() -> None:
    """A capture executes no work, and its temporary tensors hold NaN after each replay."""
    with fake_gpu() as device:
        memory, results = [torch.zeros(3)], []
        graph = device.capture(lambda: results.append(memory[0].add_(1).mul(2)))
        assert memory[0].tolist() == [0, 0, 0]
        graph.replay()
        assert memory[0].tolist() == [1, 1, 1]
        assert len(results) == 2
        assert all(result.isnan().all() for result in results)
        memory.append(memory.pop().clone())
        memory.insert(0, torch.zeros(3))
        with pytest.raises(AssertionError, match="which has changed"):
            graph.replay()
        with pytest.raises(AssertionError, match="a graph cannot contain '_local_scalar_dense'"):
            device.capture(lambda: memory[0].sum().item())
    with pytest.raises(RuntimeError, match="CPU cannot be captured"):
        HOST.capture(lambda: None)


def test_tensors_of_the_fake_device_cannot_be_mixed_with_those_of_the_host() -> None:
    with fake_gpu() as device:
        ours, host = device.zeros(3, dtype=torch.float32), torch.ones(3)
        assert ours.device == device.torch_device != host.device
        for mixed in (
            lambda: ours + host,
            lambda: torch.cat([ours.mul(2), host]),
            lambda: torch.equal(host, ours.view(3)),
            lambda: host[torch.zeros(1, dtype=torch.int64, device=ours.device)],
        ):
            with pytest.raises(RuntimeError, match="to be on the same device"):
                mixed()
        with pytest.raises(TypeError, match="to numpy"):
            ours.numpy()
        ours.copy_(host)
        (uploaded,) = device.upload([host])
        assert (uploaded + ours + 1).cpu().numpy().tolist() == [3, 3, 3]
        assert (ours.cpu() + host).tolist() == (ours.to("cpu") + host).tolist() == [2, 2, 2]
        assert (host.to(ours.device) + torch.empty(3, device=ours.device).fill_(1)).sum() == 6
    assert (ours + host).tolist() == [2, 2, 2]


def test_released_memory_contains_nan_and_is_not_used_again() -> None:
    """Read memory by its address, as kernels do, before and after the last tensor is released."""

    def read() -> list[float]:
        return np.ctypeslib.as_array((ctypes.c_float * 3).from_address(address)).tolist()

    with fake_gpu() as device:
        load = device.load([torch.ones(3), torch.ones(3, 2)])
        load.wait()
        first, second = load.tensors
        address = first.data_ptr()
        del load, first
        assert read() == [1, 1, 1], "the tensors of a load have their memory in common"
        part = second.T[0]
        del second
        assert read() == [1, 1, 1], "a view is left"
        del part
        assert np.isnan(read()).all()
        others = [device.zeros(3, dtype=torch.float32) for _ in range(100)]
        assert address not in {other.data_ptr() for other in others}
        assert np.isnan(read()).all()


def test_a_thread_may_load_but_not_compute_on_the_fake_device_before() -> None:
    with fake_gpu() as device, ThreadPoolExecutor(1) as thread:
        load = device.load([torch.ones(3)])
        for work in (
            load.wait,
            lambda: device.zeros(1, dtype=torch.float32),
            lambda: device.upload([torch.ones(1)]),
            lambda: device.read_back(load.tensors),
        ):
            with pytest.raises(AssertionError, match="is this thread's current one"):
                thread.submit(work).result()
        other = thread.submit(device.load, [torch.ones(2)]).result()
        thread.submit(other.wait).result()
        assert device.loaded == 2

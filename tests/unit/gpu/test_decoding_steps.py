"""Tests that graphs of decoding steps give the logits of single launches, on a fake and a real GPU.

`make gpu` runs the test on a GPU, which prints one line of times for each kind of step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_device import device_limits
from tests.support import random_model
from tests.support.fake_device import fake_gpu
from tests.support.gpu_kernels import ON_GPU
from tests.support.random_model import DEMO, KINDS, SEVEN_B, Model, RandomModel, Sizes, measure
from vlora.atmm import op
from vlora.device.cuda import CudaDevice

TINY = Sizes("tiny", Model(2, 32, 48, 4, 2, 16, 50), 8, 3, (1, 3), 20)


@pytest.fixture
def tiny(launch: object, cuda_operator: object) -> Iterator[tuple[RandomModel, list[str]]]:
    """Yield a model on a fake GPU, and the list of its graphs' events."""
    if ON_GPU:
        pytest.skip("the kernels run on a GPU")
    torch.manual_seed(0)
    with fake_gpu() as device:
        yield RandomModel(TINY, device, torch.float32), device.graph_events


@pytest.mark.slow
def test_each_kind_of_step_is_compared_and_timed(tiny, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(random_model, "REPEATS", 1)
    model, events = tiny
    rows = list(measure(model, TINY, torch.float32, 1e9))
    assert [(row["rows"], row["kind"]) for row in rows] == [(n, k) for n in (1, 3) for k in KINDS]
    assert all(row["difference"] < 1e-5 for row in rows)
    last = rows[-1]
    # A mixture of one row is a merged step; all other kinds have a graph for each number of rows.
    assert last["graphs"] == events.count("capture") == 7
    # Each kind is computed three times for the comparison and once for the time.
    assert last["replayed"] + last["graphs"] == 4 * len(rows)
    assert {tuple(row["ms"]) for row in rows} == {("eager", "graph")}


def test_a_wrong_graph_stops_the_comparison(tiny, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    model, _ = tiny
    monkeypatch.setattr(model, "difference", lambda *step: 0.5)
    with pytest.raises(AssertionError, match=r"tiny base 1: logits differ by 5\.0e-01"):
        next(measure(model, TINY, torch.float32, 1e9))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("sizes", [DEMO, SEVEN_B], ids=lambda sizes: sizes.name)
def test_graphs_on_a_gpu_equal_single_launches(sizes: Sizes) -> None:
    device = CudaDevice(torch.cuda.current_device())
    # Without ATMM for CUDA, steps with adapters have no graph.
    kinds = KINDS if op.captures(torch.device("cuda")) else KINDS[:1]
    model, bandwidth = RandomModel(sizes, device, torch.bfloat16), device_limits().copy
    for row in measure(model, sizes, torch.bfloat16, bandwidth, kinds):
        print(json.dumps(row))

"""Tests of the stage of `make gpu` that compares graphs with single launches, on a fake GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support import random_model as decoding
from tests.support.fake_device import fake_gpu
from tests.support.random_model import KINDS, RandomModel, Sizes, measure
from tools.gpu import step_costs

TINY = Sizes("tiny", step_costs.Model(2, 32, 48, 4, 2, 16, 50), 8, 3, (1, 3), 20)

# numpy, in which kernels are interpreted, warns of infinities; a GPU does not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning"),
    pytest.mark.usefixtures("launch", "cuda_operator"),
]


@pytest.mark.slow
def test_each_kind_of_step_is_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "REPEATS", 1)
    torch.manual_seed(0)
    with fake_gpu() as device:
        model = RandomModel(TINY, device, torch.float32)
        rows = list(measure(model, TINY, torch.float32, 1e9))
    assert [(row["rows"], row["kind"]) for row in rows] == [(n, k) for n in (1, 3) for k in KINDS]
    assert all(row["difference"] < 1e-5 for row in rows)
    last = rows[-1]
    # A mixture of one row is a merged step; all other kinds have a graph for each number of rows.
    assert last["graphs"] == device.graph_events.count("capture") == 7
    # Each kind is computed three times for the comparison and once for the time.
    assert last["replayed"] + last["graphs"] == 4 * len(rows)
    assert {tuple(row["ms"]) for row in rows} == {("eager", "graph")}


def test_a_wrong_graph_stops_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu() as device:
        model = RandomModel(TINY, device, torch.float32)
        monkeypatch.setattr(model, "difference", lambda *step: 0.5)
        with pytest.raises(AssertionError, match=r"tiny base 1: logits differ by 5\.0e-01"):
            next(measure(model, TINY, torch.float32, 1e9))

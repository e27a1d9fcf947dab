"""The committed checkpoint through gRPC answers as transformers + PEFT do, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.demo.__main__ import ADAPTERS, CHECKPOINT
from tools.demo.accuracy import compare
from vlora.launcher.server import ServerOptions, TritonServer

ITEMS = 6
"""Of each domain; `make accuracy` takes all."""


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("demo-server") / "tritonserver.log"
    with TritonServer(ServerOptions(log=log)) as server:
        yield server


@pytest.mark.slow
def test_served_predictions_equal_the_oracles(demo_server: TritonServer) -> None:
    found = compare(demo_server.grpc_url, ITEMS, CHECKPOINT, Path(ADAPTERS))
    assert [line for one in found for line in one.wrong] == []
    total = sum(one.items for one in found)
    assert total >= 6 * 11
    assert sum(one.ties for one in found) <= max(1, total // 100)
    answered = sum(one.served_right for one in found)
    assert answered / total > 0.7, "the trained checkpoint answers most of its own held-out set"

"""Test that the demo checkpoint answers over gRPC as transformers with PEFT does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.demo.__main__ import ADAPTERS, CHECKPOINT
from tools.demo.accuracy import compare
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

ITEMS = 6
"""Number of items per domain; `make accuracy` uses all items."""


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("demo-server") / "tritonserver.log"
    with TritonServer(ServerOptions(log=log)) as server:
        yield server


@pytest.mark.slow
def test_served_predictions_equal_the_oracles(demo_server: TritonServer) -> None:
    domains = compare(demo_server.grpc_url, ITEMS, CHECKPOINT, Path(ADAPTERS))
    assert [line for domain in domains for line in domain.wrong] == []
    total = sum(domain.items for domain in domains)
    assert total >= 6 * 11
    assert sum(domain.ties for domain in domains) <= max(1, total // 100)
    answered = sum(domain.served_right for domain in domains)
    assert answered / total > 0.7, "the checkpoint answers most of its held-out set correctly"

"""Fixtures of real servers and a gateway, which tests of several files share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway import Gateway, running
from tests.support.triton_client import Asker, asking, serving
from tools.demo.__main__ import ADAPTERS
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.triton)


@pytest.fixture(scope="session")
def served_adapters(adapters_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the random adapters and one that cannot be loaded."""
    root = tmp_path_factory.mktemp("served-adapters")
    for folder in adapters_dir.iterdir():
        (root / folder.name).symlink_to(folder)
    broken = root / "broken"
    broken.mkdir()
    for file in (adapters_dir / "attention-r4").iterdir():
        if file.name != "adapter_config.json":
            (broken / file.name).symlink_to(file)
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    return root


@pytest.fixture(scope="session")
def server(
    checkpoint: Path, served_adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    options = ServerOptions(
        model=checkpoint,
        adapters=served_adapters,
        multi_lora={"alias": "attention-r4"},
        log=tmp_path_factory.mktemp("server") / "tritonserver.log",
    )
    with TritonServer(options) as started:
        yield started


@pytest.fixture
def ask(server: TritonServer) -> Iterator[Asker]:
    """Yield a client of the session's server. The server must still run after the test."""
    with asking(server) as asker:
        yield asker
    assert server.poll() is None, server.explain()


@pytest.fixture(scope="session")
def gateway(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Yield a gateway of the session's server. It accepts bodies of up to 1 MB."""
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    options = ("--metrics-url", server.metrics_url, "--max-body", "1")
    with running(server.grpc_url, tmp_path_factory.mktemp("gateway"), *options) as started:
        yield started


@pytest.fixture(scope="session")
def demo_adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the demo's adapters, which a test may break."""
    return Path(shutil.copytree(ADAPTERS, tmp_path_factory.mktemp("demo") / "adapters"))


@pytest.fixture(scope="session")
def demo_server(
    demo_adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Yield a server of the demo model."""
    log = tmp_path_factory.mktemp("demo-server") / "tritonserver.log"
    with serving(ServerOptions(adapters=demo_adapters, log=log)) as started:
        yield started

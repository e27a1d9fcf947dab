"""Fixtures of the playground: a browser, a server of the demo model, and a gateway."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page, browser
from tests.support.gateway import Gateway, running
from tests.support.playground import WIDTHS
from tools.demo.__main__ import ADAPTERS
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the demo's adapters, which a test may break."""
    return Path(shutil.copytree(ADAPTERS, tmp_path_factory.mktemp("demo") / "adapters"))


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="session")
def playground_server(
    driver: Any, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("playground-server") / "tritonserver.log"
    with TritonServer(ServerOptions(adapters=adapters, log=log)) as server:
        yield server


@pytest.fixture(scope="session")
def gateway(
    playground_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("playground")
    options = ("--metrics-url", playground_server.metrics_url)
    with running(playground_server.grpc_url, folder, *options) as started:
        yield started


@pytest.fixture(params=WIDTHS)
def page(driver: Any, gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Yield the loaded page. Its console must show no messages that a test has not read."""
    page = Page(driver, request.param)
    page.open(gateway.address)
    page.wait("#status", "7 adapters")
    yield page
    assert page.faults() == []
    assert page.run("return document.documentElement.scrollWidth <= innerWidth"), "too wide"
    page.driver.get("about:blank")

"""Fixtures of the playground: a browser, and a gateway of the demo's server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import Page, browser
from tests.support.gateway import Gateway, running
from tests.support.playground import WIDTHS
from vlora.launcher.server import TritonServer


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="session")
def gateway(
    driver: Any, demo_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """Yield a gateway of the demo's server. Without a browser, no server is started."""
    folder = tmp_path_factory.mktemp("playground")
    options = ("--metrics-url", demo_server.metrics_url)
    with running(demo_server.grpc_url, folder, *options) as started:
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

"""Tests of the playground's errors, API keys, and connections that break off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page
from tests.support.gateway import KEY, Gateway, running
from tests.support.playground import WIDTHS, example
from tests.support.polling import until
from vlora.launcher.server import TritonServer

pytestmark = pytest.mark.slow

ENDLESS = """
    const send = window.fetch;
    window.fetch = (path, options) => send(path, !options.body ? options :
      {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})});
"""
"""Script for the page. It makes every answer `max_tokens` tokens long, so that a test can act
before the answer ends."""


def test_nothing_is_loaded_from_elsewhere(page: Page, gateway: Gateway) -> None:
    example(page, "vqa")
    page.answer()
    names = page.run("return performance.getEntriesByType('resource').map(({name}) => name)")
    assert names
    assert all(name.startswith((f"http://{gateway.address}/", "data:")) for name in names)


def test_an_error_of_an_adapter_is_shown(page: Page, demo_adapters: Path) -> None:
    page.choose(".column-a .adapter", "glyphs")
    page.write("#question", "What symbol is this?")
    config = demo_adapters / "glyphs" / "adapter_config.json"
    before = config.read_text()
    try:
        config.write_text("{")

        def failure() -> str:
            page.click("#ask")
            until(lambda: page.text(".meta") or page.text(".failure"))
            return page.text(".failure")

        text = until(failure)
        assert "The request is wrong" in text
        assert "adapter 'glyphs': adapter_config.json is not valid JSON" in text
        assert "INVALID_ARG" in text
        assert page.all(".failure button") == [], "to ask again would not help"
        page.wait("#status", "6 adapters")
        assert "glyphs (no longer known)" in page.text(".adapter")
    finally:
        config.write_text(before)
    assert all("status of 400" in fault for fault in page.faults())
    page.wait("#status", "7 adapters")
    page.click("#ask")
    assert page.answer()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_server_that_is_dropped_is_found_again(
    driver: Any, demo_server: TritonServer, tmp_path: Path, width: int
) -> None:
    """Kill the gateway in the middle of an answer, start it again, and ask again."""
    page = Page(driver, width)
    with running(demo_server.grpc_url, tmp_path) as first:
        page.open(first.address)
        page.wait("#status", "Connected")
        page.click(".more summary")
        page.write("#max-tokens", "900")
        page.write("#question", "What is it?")
        page.run(ENDLESS)
        page.click("#ask")
        until(lambda: page.text(".answer"))
        first.kill()
    page.wait(".failure button", "Try again")
    assert page.text(".failure strong") == "The answer broke off"
    assert page.text(".answer"), "what has come stays"
    page.wait("#status", "No connection to the gateway; trying again")
    port = int(first.address.rpartition(":")[2])
    with running(demo_server.grpc_url, tmp_path, port=port):
        page.wait("#status", "Connected")
        page.click(".failure button")
        page.answer()
        assert not page.find(".failure").is_displayed()
        assert all("net::ERR" in fault for fault in page.faults())
        driver.get("about:blank")


def test_a_gateway_without_a_server_says_so(driver: Any, tmp_path: Path) -> None:
    with running("127.0.0.1:9", tmp_path) as gateway:
        page = Page(driver, WIDTHS[0])
        page.open(gateway.address)
        page.wait("#status", "The server is not available; trying again")
        page.faults()
        driver.get("about:blank")


def test_a_key_is_asked_for_and_kept_in_memory_only(
    driver: Any, demo_server: TritonServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    with running(demo_server.grpc_url, tmp_path, "--keys", str(keys)) as gateway:
        page = Page(driver, WIDTHS[0])
        page.open(gateway.address)
        page.wait("#status", "Enter an API key")
        form = page.find("#key-form").rect
        assert 0 <= form["x"] <= form["x"] + form["width"] <= WIDTHS[0]
        page.write("#key", "another-key-that-is-wrong")
        page.press("ENTER")
        page.wait("#status", "The API key is not known")
        page.write("#key", KEY)
        page.press("ENTER")
        page.wait("#status", "7 adapters")
        example(page, "vqa")
        assert page.answer() == "blue"
        kept = page.run(
            "return [location.href, document.cookie, {...localStorage},"
            " {...sessionStorage}, document.documentElement.outerHTML]"
        )
        assert KEY not in json.dumps(kept)
        assert page.find("#key").get_property("value") == ""
        assert all("status of 401" in fault for fault in page.faults())
        driver.get("about:blank")

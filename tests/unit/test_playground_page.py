"""Tests that the playground's files are small, load nothing from elsewhere, and escape text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra gateway is not installed")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from vlora.gateway.app import EXAMPLES, PAGE
from vlora.static_pages import POLICY, StaticPages

FILES = sorted(PAGE.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
MAX_BYTES = 60 * 1024
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    r"|localStorage|sessionStorage|document\.cookie"
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_neither_builds_markup_nor_stores_anything(script: Path) -> None:
    assert MARKUP.findall(script.read_text()) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_names_nothing_of_other_hosts(file: Path) -> None:
    found = re.findall(r"https?://[^\s\"')]+", file.read_text())
    assert set(found) <= {"http://www.w3.org/2000/svg"}


def test_the_page_is_small_and_has_no_inline_script_or_style() -> None:
    assert sum(file.stat().st_size for file in FILES) <= MAX_BYTES
    page = (PAGE / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="main.js">']
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
    assert "unsafe" not in POLICY


def test_every_response_has_the_security_headers() -> None:
    app = FastAPI()
    app.mount("/examples", StaticPages(directory=EXAMPLES))
    app.mount("/", StaticPages(directory=PAGE, html=True))
    client = TestClient(app)
    for path in ("/", "/main.js", "/style.css", "/icon.svg", "/examples/index.json"):
        response = client.get(path)
        assert response.status_code == 200, path
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        again = client.get(path, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304
        assert again.headers["content-security-policy"] == POLICY
    assert client.get("/examples/../../app.py").status_code == 404
    assert "javascript" in client.get("/main.js").headers["content-type"]

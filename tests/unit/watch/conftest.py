"""Fixtures of a running watch and a fake Triton server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cameras import WatchRun
from tests.support.fake_triton import FakeTriton


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with FakeTriton() as started:
        yield started


@pytest.fixture
def start(
    tmp_path: Path, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., WatchRun]]:
    """Yield a function that starts to watch the cameras of a file with this content."""
    monkeypatch.setattr("vlora.watch.run.RELOAD_SECONDS", 0.05)
    monkeypatch.setattr("vlora.watch.camera.MIN_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("vlora.watch.camera.MAX_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr("vlora.watch.streams.MIN_OPEN_SECONDS", 1.0)
    runs: list[WatchRun] = []

    def started(**cameras: dict[str, Any]) -> WatchRun:
        runs.append(WatchRun(tmp_path, triton.url, cameras))
        runs[-1].start()
        return runs[-1]

    yield started
    for run in runs:
        run.stop()

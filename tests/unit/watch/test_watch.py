"""Tests of `vlora watch` against a fake Triton server: sources, chunks, requests, changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.cameras import write_video
from tests.support.fake_triton import FakeTriton
from tests.support.polling import until
from vlora.watch.asking import Analytics
from vlora.watch.config import read_cameras
from vlora.watch.desk import open_desk
from vlora.watch.run import Watch, Watched


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with FakeTriton() as started:
        yield started


class Run:
    """A `Watch` in a thread of its own, on a file that a test may change."""

    def __init__(self, folder: Path, triton: FakeTriton, content: dict[str, Any]) -> None:
        self._folder, self._triton = folder, triton
        self.path = folder / "cameras.yaml"
        self.log = folder / "answers.jsonl"
        self.lines: list[str] = []
        self.watch: Watch | None = None
        self.write(content)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def write(self, content: dict[str, Any]) -> None:
        content = {"retention": {"folder": str(self._folder / "kept")}, **content}
        self.path.write_text(yaml.safe_dump({"server": self._triton.url, **content}))

    def start(self) -> None:
        self._thread.start()
        until(lambda: self.watch and self.watch.watched(), 10)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        cameras = read_cameras(self.path)
        analytics = Analytics(cameras.server)
        desk = open_desk(cameras.sinks, cameras.retention)
        try:
            with self.log.open("w") as log, contextlib.suppress(asyncio.CancelledError):
                self.watch = Watch(self.path, cameras, analytics, desk, self.lines.append, log)
                await self.watch.run()
        finally:
            await analytics.close()
            desk.close(1.0)

    def __getitem__(self, name: str) -> Watched:
        assert self.watch is not None
        return next(one for one in self.watch.watched() if one.reader.name == name)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def start(
    tmp_path: Path, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Run]]:
    """Yield a function that starts to watch the cameras of a file with this content."""
    monkeypatch.setattr("vlora.watch.run.RELOAD_SECONDS", 0.05)
    runs: list[Run] = []

    def started(**cameras: dict[str, Any]) -> Run:
        runs.append(Run(tmp_path, triton, {"cameras": cameras}))
        runs[-1].start()
        return runs[-1]

    yield started
    for run in runs:
        run.stop()


def test_a_file_read_fast_is_cut_into_chunks_and_every_chunk_is_answered(start, triton, tmp_path):
    write_video(tmp_path / "clip.mp4", 10, [index * 10 for index in range(25)])
    run = start(door={"url": "clip.mp4", "frames": 2, "pace": "fast", "adapter": "actions"})
    run.join()
    assert len(triton.requests) == len(run.records) == 3
    keys = json.loads(triton.requests[0]["sampling_parameters"][0])
    assert keys["lora_name"] == "actions"
    assert keys["supersede"]
    assert keys["deadline_ms"] == 4000
    assert triton.headers[0]["x-lora-adapter"] == f"actions/{keys['stream_id']}"
    assert {len(request["frames"]) for request in triton.requests} == {2}
    assert run["door"].reader.counts.drops == 0
    spans = [one["ended"] - one["began"] for one in run.records]
    assert spans == pytest.approx([0.5, 0.5, 0.4])
    assert all(one["result"]["text"] == "moving left" for one in run.records)

"""Videos and cameras for tests of `vlora watch`, and its run in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.polling import until
from tests.support.watching import free_port
from vlora.watch.asking import Analytics
from vlora.watch.config import read_cameras
from vlora.watch.desk import open_desk
from vlora.watch.run import Watch, Watched

RTSP_SERVER = Path(__file__).with_name("rtsp_server.py")
SYSTEM_PYTHON = "/usr/bin/python3"  # The one for which Debian has GStreamer.
NEEDS = """import gi
gi.require_version("GstRtspServer", "1.0")
from gi.repository import Gst, GstRtspServer
Gst.init(None)
assert all(map(Gst.ElementFactory.find, ("videotestsrc", "x264enc", "rtph264pay")))
"""


def write_video(
    path: Path,
    rate: int,
    shades: Sequence[Any],
    size: tuple[int, int] = (32, 32),
    codec: str = "mpeg4",
    **options: str,
) -> Path:
    """Write a video of grey frames (width, height), `rate` of them per second. Return its path.

    shades: for each frame a grey value, or an array that fills [height, width, 3].
    """
    av = pytest.importorskip("av", reason="the package `av` is not installed")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size
        for shade in shades:
            pixels = np.full((size[1], size[0], 3), shade, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


class RtspCamera:
    """A camera of `rtsp_server.py`, which has the options. It keeps its port if it starts again."""

    def __init__(self, *options: str) -> None:
        command = [SYSTEM_PYTHON, "-c", NEEDS]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("GStreamer's RTSP server is not installed (see CONTRIBUTING.md)")
        self._options, self.port = options, str(free_port())
        self.start()

    @property
    def url(self) -> str:
        return f"rtsp://127.0.0.1:{self.port}/camera"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [SYSTEM_PYTHON, str(RTSP_SERVER), self.port, *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class LossyRelay:
    """A relay between a client and an RTSP server, through which the packets of UDP come.

    loss: share of the packets of video that it drops. lost: how many it has dropped.
    """

    def __init__(self, port: str) -> None:
        self.loss, self.lost = 0.0, 0
        self._server = ("127.0.0.1", int(port))
        self._random = random.Random(7)
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.url = f"rtsp://127.0.0.1:{self._sockets[0].getsockname()[1]}/camera"
        self._start(self._accept)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # The other side may have ended the connection.
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):  # The sockets are closed at the end.
                work(*arguments)

        threading.Thread(target=run, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client = self._sockets[0].accept()[0]
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            self._start(self._pass_on, client, server)
            self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(re.sub(rb"client_port=(\d+)-\d+", self._own_ports, data))
        target.shutdown(socket.SHUT_RDWR)

    def _own_ports(self, found: re.Match[bytes]) -> bytes:
        """Put the ports of new sockets in place of the client's, to which they pass packets on."""
        pair = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        for one in pair:
            one.bind(("127.0.0.1", 0))
        self._sockets += pair
        for index, one in enumerate(pair):
            self._start(self._pass_packets, one, int(found[1]) + index)
        ports = [one.getsockname()[1] for one in pair]
        return b"client_port=%d-%d" % (ports[0], ports[1])

    def _pass_packets(self, source: socket.socket, port: int) -> None:
        is_video = port % 2 == 0
        while data := source.recv(65536):
            if is_video and self._random.random() < self.loss:
                self.lost += 1
            else:
                source.sendto(data, ("127.0.0.1", port))


class WatchRun:
    """A `Watch` in a thread of its own, on a file that a test may change.

    lines: what it reported. records: its records of answers.
    """

    def __init__(self, folder: Path, server: str, cameras: dict[str, Any]) -> None:
        self._folder, self._server = folder, server
        self.path = folder / "cameras.yaml"
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.watch: Watch | None = None
        self._count = len(cameras)
        self.write(cameras)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def write(self, cameras: dict[str, Any]) -> None:
        kept = {"folder": str(self._folder / "kept")}
        content = {"server": self._server, "retention": kept, "cameras": cameras}
        self.path.write_text(yaml.safe_dump(content))

    def start(self) -> None:
        self._thread.start()
        until(lambda: self.watch and len(self.watch.watched()) >= self._count)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()

    def join(self) -> None:
        """Wait until all sources have ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task = asyncio.get_running_loop(), task
        cameras = read_cameras(self.path)
        desk = open_desk(cameras.sinks, cameras.retention)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                async with Analytics(cameras.server) as analytics:
                    report, record = self.lines.append, self.records.append
                    self.watch = Watch(self.path, cameras, analytics, desk, report, record)
                    await self.watch.run()
        finally:
            desk.close(1.0)

    def __getitem__(self, name: str) -> Watched:
        assert self.watch is not None
        return next(one for one in self.watch.watched() if one.name == name)

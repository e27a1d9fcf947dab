"""A server with a gateway in front of it, and the requests for one model."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil

from benchmarks import llava
from benchmarks.benchmark import demo_folder
from benchmarks.engine.load import OUTPUT, Load, png
from benchmarks.gateway.clients import Ask, BenchmarkError
from benchmarks.gateway.instant import InstantServer
from vlora.launcher.processes import start_tied
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.net import LOOPBACK, choose_ports, get

DEMO_SIDE = 256
"""Side of the demo model's random images in pixels."""
START_SECONDS = 60.0
STOP_SECONDS = 10.0


class Model:
    """Checkpoint with adapters, and requests for it.

    name: `demo`, `mid-size`, or `instant` for a server that answers at once, without a model.
    """

    def __init__(self, name: str, root: Path | None) -> None:
        self.name = name
        self._checkpoint = None
        if name == "mid-size":
            self._checkpoint = llava.make(llava.MODELS["whole"], root)

    def server(self) -> TritonServer | InstantServer:
        """Return a server of the model, which the caller starts."""
        if self.name == "instant":
            return InstantServer()
        if self._checkpoint is None:
            return TritonServer(ServerOptions())
        model, adapters = self._checkpoint.folder, self._checkpoint.adapters
        return TritonServer(ServerOptions(model=model, adapters=adapters))

    def draw(self, kind: str, adapters: int, requests: int, seed: int) -> list[Ask]:
        """Return requests that rotate over the adapters; each seed has its own texts or images."""
        if self._checkpoint is not None:
            load = Load(kind, adapters, requests).draw(self._checkpoint, seed)
            return [Ask(one.prompt, one.file(), one.adapter, "raw", OUTPUT) for one in load]
        folder = demo_folder() / "adapters"
        known = sorted(path.name for path in folder.iterdir() if path.is_dir())
        names = [None] if self.name == "instant" or not adapters else known[:adapters]
        rng = np.random.default_rng(seed)
        return [
            Ask(
                f"How many objects are there in picture {rng.integers(1 << 30)}?",
                png(rng.integers(0, 256, (DEMO_SIDE, DEMO_SIDE, 3), np.uint8))
                if kind == "image"
                else None,
                names[i % len(names)],
                "vqa",
                OUTPUT,
            )
            for i in range(requests)
        ]


class Serving:
    """A running server and its gateway. Use as a context manager."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.server = model.server()
        self.port = choose_ports({"port": 0}, LOOPBACK)["port"]
        self.gateway: psutil.Process
        self._stack = ExitStack()

    def __enter__(self) -> Serving:
        with ExitStack() as stack:
            stack.enter_context(self.server)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log = stack.enter_context((Path(folder) / "gateway.log").open("wb"))
            command = [sys.executable, "-m", "vlora.cli", "gateway", "--port", str(self.port)]
            command += ["--grpc", self.server.grpc_url]
            if self.server.metrics_url is not None:
                command += ["--metrics-url", self.server.metrics_url]
            process = start_tied(command, os.environ, log)
            stack.callback(process.wait, STOP_SECONDS)
            stack.callback(process.terminate)
            self._wait()
            self.gateway = psutil.Process(process.pid)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples in the gateway's /metrics."""
        page = get(f"http://{LOOPBACK}:{self.port}/metrics", 10.0, True).decode()
        lines = [line.split() for line in page.splitlines()]
        return sum(float(line[-1]) for line in lines if line and line[0].partition("{")[0] == name)

    def gateway_seconds(self) -> float:
        """Return the CPU time in seconds that the gateway's process has taken so far."""
        times = self.gateway.cpu_times()
        return float(times.user + times.system)

    def _wait(self) -> None:
        """Wait until the gateway answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                get(f"http://{LOOPBACK}:{self.port}/health", 5.0, True)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise BenchmarkError(f"the gateway does not answer: {error}") from error
                time.sleep(0.1)

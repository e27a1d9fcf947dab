"""Starts, watches, drains and ends a Triton server with our model repository.

`TritonServer` is a context manager: `vlora serve`, the tests and the benches use the same one.
Ready means that every model folder is READY in the repository index, since a model whose
`config.pbtxt` has an unknown field vanishes with only a log line.

**Invariant:** whatever was started is ended, the models' processes included, which can outlive a
crashed server: by this object; where its process is killed, by the kernel (`tether.py`) and by the
models themselves (`lifeline.py`); and what is left of its files by the next start.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from vlora.config import ADAPTERS_VARIABLE, MODEL_VARIABLE, load_adapter_names
from vlora.launcher import draining, server_log
from vlora.launcher.assembly import Assembly, ServerError, assemble
from vlora.launcher.ports import choose_ports
from vlora.launcher.processes import children, end, ended_with, how_it_ended, is_alive, start_tied
from vlora.launcher.run_folder import (
    RUN_VARIABLE,
    processes_of,
    release_shared_memory,
    run_folder,
    shared_memory_prefix,
    starting_file,
)
from vlora.paths import model_repository

START_SECONDS = 180.0
GRACE_SECONDS = 30.0
CANCEL_SECONDS = 5.0
"""What ending the requests that are left after the grace may take."""
EXIT_SECONDS = 5.0
"""What Triton gets to unload its models once nothing runs any more. It waits that long for idle
HTTP connections too, however long they have been idle: no option of 2.51 closes them."""
STANDARD_OUTPUT = Path("-")
PYTHON_BACKEND = {
    # A 7B checkpoint takes longer to load than the default 30 s.
    "stub-timeout-seconds": "600",
    # Blocking calls between models (at most 128) each hold one; sending answers needs more.
    "thread-pool-size": "160",
}


def default_repository() -> Path:
    """The repository of this source tree, or the one that the installed package carries."""
    folder = model_repository()
    if not folder.is_dir():
        raise ServerError(f"no model repository at {folder}; install vlora again")
    return folder


@dataclass(frozen=True)
class ServerOptions:
    """What to serve and where. Ports of 0 mean any free one.

    model, adapters: override `model.json`. model_json: keys that replace those of `model.json`,
    multi_lora: entries added to `multi_lora.json`, both in a copy of the repository made for this
    run. environment: added to the server's. log: a file, or `STANDARD_OUTPUT`. grace_seconds: what
    running requests get to finish when the server stops. triton_arguments:
    further ones of tritonserver itself.
    """

    repository: Path = field(default_factory=default_repository)
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    model: Path | None = None
    adapters: Path | None = None
    model_json: Mapping[str, Any] = field(default_factory=dict)
    multi_lora: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    grace_seconds: float = GRACE_SECONDS
    triton_arguments: tuple[str, ...] = ()


class TritonServer:
    """A running server; `with TritonServer(options) as server:` starts it and waits until ready.

    Raises ServerError when a port is taken, a library is missing or a model does not load.
    """

    def __init__(self, options: ServerOptions | None = None) -> None:
        options = options or ServerOptions()
        ports = ("http_port", "grpc_port", "metrics_port")
        chosen: dict[str, Any] = choose_ports({name: getattr(options, name) for name in ports})
        self.options = replace(options, **chosen)
        self.log = Path()
        self._stack = ExitStack()
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._models: dict[psutil.Process, str] = {}
        self._ready_at: int | None = None
        """Bytes of the log when every model was READY."""

    @property
    def http_url(self) -> str:
        return f"localhost:{self.options.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"localhost:{self.options.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://localhost:{self.options.metrics_port}/metrics"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def models(self) -> dict[str, int]:
        """The process id of every model that has a process, by its name."""
        return {name: process.pid for process, name in self._models.items()}

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server has not been started")
        return self._process

    def __enter__(self) -> TritonServer:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        self._folder = self._stack.enter_context(run_folder())
        assembly = assemble(self._folder)
        repository = self._repository(self._folder)
        self.log = self.options.log or self._folder / "tritonserver.log"
        log = None
        if self.log != STANDARD_OUTPUT:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            log = self._stack.enter_context(self.log.open("wb"))
        starting_file(self._folder, self.options.grpc_port).touch()
        command = [str(assembly.binary), *assembly.arguments, *self._arguments(repository)]
        self._process = start_tied(command, self._environment(assembly), log)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Return once every model is READY; raise ServerError with the reason otherwise."""
        expected = {folder.parent.name for folder in self.options.repository.glob("*/config.pbtxt")}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self.poll()
            if status is not None:
                raise ServerError(
                    f"the server ended with {ended_with(status)} while starting\n{self.explain()}"
                )
            if self._get("/v2/health/ready") is not None:
                break
            time.sleep(0.1)
        else:
            raise ServerError(f"the server was not ready in {seconds:.0f} s\n{self.explain()}")
        found = children(self._running.pid)
        self._models = {one: _model_of(one) for one in found if is_alive(one)}
        states = self.index()
        missing = {name: states.get(name, "absent") for name in expected}
        missing = {name: state for name, state in missing.items() if state != "READY"}
        if missing:
            raise ServerError(f"not every model is READY: {missing}\n{self.explain()}")
        starting_file(self._folder, self.options.grpc_port).unlink()
        self._ready_at = self.log.stat().st_size if self.log.is_file() else 0

    def index(self) -> dict[str, str]:
        """State of every model, from the repository index."""
        body = self._get("/v2/repository/index", post=True)
        if body is None:
            return {}
        return {entry["name"]: entry.get("state", "absent") for entry in json.loads(body)}

    def wait(self) -> int:
        """Block until the server process ends; its exit status."""
        return self._running.wait()

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._running.poll()

    def failure(self) -> str | None:
        """What ended that should run, in a sentence; None while all is well.

        Triton neither restarts a model whose process has ended nor says so: it goes on calling
        itself live and ready.
        """
        status = self.poll()
        if status is not None:
            return f"the server ended by itself with {ended_with(status)}"
        for process, model in self._models.items():
            if not is_alive(process):
                how = how_it_ended(process)
                return f"the process of model '{model}' ended" + (f" with {how}" if how else "")
        return None

    def stop(self, grace_seconds: float | None = None) -> None:
        """Refuse new requests, let running ones finish for so long (by default as the options
        say), cancel the rest, then end the server. Safe to call twice."""
        if self._process is not None and self.is_running:
            grace = self.options.grace_seconds if grace_seconds is None else grace_seconds
            if self.failure() is None:
                self._drain(grace)
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End everything at once. Safe to call twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            end(processes_of(self._folder), grace_seconds=1.0)
            release_shared_memory(self._folder)
        self._stack.close()

    def _drain(self, seconds: float) -> None:
        """Has the models refuse what comes and finish what runs; returns when they have."""
        deadline = time.monotonic() + seconds + CANCEL_SECONDS
        draining.begin(self._folder, seconds)
        while draining.unfinished(self._folder) and time.monotonic() < deadline:
            if self.failure() is not None:
                return
            time.sleep(0.02)

    def explain(self) -> str:
        """What the log says went wrong: while it started, or since it was ready; "" if nothing."""
        if self._ready_at is None:
            return server_log.why_not_started(self._said())
        return server_log.why_it_went_down(self._said(self._ready_at))

    def broken_adapters(self) -> list[str]:
        """Names of adapters that the log says do not load."""
        return server_log.broken_adapters(self._said())

    def _said(self, start: int = 0) -> str:
        """The log from this byte on; "" where it is no file."""
        return self.log.read_bytes()[start:].decode(errors="replace") if self.log.is_file() else ""

    def _repository(self, folder: Path) -> Path:
        """The repository to serve: the given one, or a copy under `folder` with the overrides."""
        if not (self.options.model_json or self.options.multi_lora):
            return self.options.repository
        copy = folder / "model_repository"
        shutil.copytree(self.options.repository, copy, ignore=shutil.ignore_patterns("__pycache__"))
        original = self.options.repository / "lmm" / "1" / "model.json"
        keys = json.loads(original.read_text())
        for key in ("model", "adapters"):
            if keys.get(key):
                keys[key] = str((original.parent / keys[key]).resolve())
        version = copy / "lmm" / "1"
        (version / "model.json").write_text(json.dumps(keys | dict(self.options.model_json)))
        names = load_adapter_names(version / "multi_lora.json") | dict(self.options.multi_lora)
        (version / "multi_lora.json").write_text(json.dumps(names))
        return copy

    def _arguments(self, repository: Path) -> list[str]:
        prefix = shared_memory_prefix(self._folder)
        python = {**PYTHON_BACKEND, "shm-region-prefix-name": prefix}
        return [
            f"--model-repository={repository}",
            f"--http-port={self.options.http_port}",
            f"--grpc-port={self.options.grpc_port}",
            f"--metrics-port={self.options.metrics_port}",
            "--disable-auto-complete-config",
            "--reuse-http-port=false",
            "--reuse-grpc-port=false",
            # Of a SIGTERM to Triton itself, which passes us by; ours comes when nothing runs.
            f"--exit-timeout-secs={math.ceil(self.options.grace_seconds)}",
            *(f"--backend-config=python,{key}={value}" for key, value in python.items()),
            *self.options.triton_arguments,
        ]

    def _environment(self, assembly: Assembly) -> dict[str, str]:
        environment = {**os.environ, **assembly.environment, **self.options.environment}
        environment[RUN_VARIABLE] = str(self._folder)
        for variable, folder in (
            (MODEL_VARIABLE, self.options.model),
            (ADAPTERS_VARIABLE, self.options.adapters),
        ):
            if folder is not None:
                environment[variable] = str(folder.resolve())
        return environment

    def _get(self, path: str, post: bool = False) -> bytes | None:
        request = urllib.request.Request(
            f"http://{self.http_url}{path}", data=b"{}" if post else None
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return bytes(answer.read())
        except (OSError, urllib.error.URLError):
            return None


def _model_of(process: psutil.Process) -> str:
    """The model that a stub serves: its first argument is `…/<model>/<version>/model.py`."""
    try:
        return Path(process.cmdline()[1]).parent.parent.name
    except (IndexError, psutil.Error):
        return f"of process {process.pid}"

"""Starts, watches and ends a Triton server with our model repository.

`TritonServer` is a context manager: `vlora serve`, the tests and the benches use the same one.
Ready means that every model folder is READY in the repository index, since a model whose
`config.pbtxt` has an unknown field vanishes with only a log line.

**Invariant:** whatever was started is ended by its recorded process id, stubs included: they can
outlive a crashed server.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import vlora
from vlora.config import ADAPTERS_VARIABLE, MODEL_VARIABLE, load_adapter_names
from vlora.serving.assembly import Assembly, ServerError, assemble
from vlora.serving.processes import ProcessId, children, end, identify

START_SECONDS = 180.0
DRAIN_SECONDS = 30.0
STACK = "\\n\\nAt:"
"""Where the Python stack begins in a line of Triton's log."""

NOISE = ("CudaDriverHelper", "unable to create stream", "Failed to initialize NVML")
"""Errors in the log of a server that is well, but has no GPU."""

PYTHON_BACKEND = {
    # A 7B checkpoint takes longer to load than the default 30 s.
    "stub-timeout-seconds": "600",
    # Blocking calls between models (at most 128) each hold one; sending answers needs more.
    "thread-pool-size": "160",
}


def default_repository() -> Path:
    """The repository of this source tree."""
    folder = Path(vlora.__file__).resolve().parents[2] / "model_repository"
    if not folder.is_dir():
        raise ServerError(f"no model repository at {folder}; run from a source tree of vlora")
    return folder


@dataclass(frozen=True)
class ServerOptions:
    """What to serve and where. Ports of 0 mean any free one.

    model, adapters: override `model.json`. model_json: keys that replace those of `model.json`,
    multi_lora: entries added to `multi_lora.json`, both in a copy of the repository made for this
    run. environment: added to the server's.
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


class TritonServer:
    """A running server; `with TritonServer(options) as server:` starts it and waits until ready.

    Raises ServerError when a port is taken, a library is missing or a model does not load.
    """

    def __init__(self, options: ServerOptions | None = None) -> None:
        self.options = _with_ports(options or ServerOptions())
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._stubs: set[ProcessId] = set()
        self._shm_prefix = f"vlora_{os.getpid()}_{self.options.grpc_port}_"
        self.log = Path()

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
    def pid(self) -> int:
        return self._running.pid

    @property
    def stub_pids(self) -> tuple[int, ...]:
        return tuple(stub.pid for stub in sorted(self._stubs))

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
            self.stop(drain_seconds=0)
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
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="vlora-")))
        assembly = assemble(folder)
        repository = self._repository(folder)
        self.log = self.options.log or folder / "tritonserver.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log: IO[bytes] = self._stack.enter_context(self.log.open("wb"))
        self._process = subprocess.Popen(
            [str(assembly.binary), *assembly.arguments, *self._arguments(repository)],
            env=self._environment(assembly),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Return once every model is READY; raise ServerError with the reason otherwise."""
        expected = {folder.parent.name for folder in self.options.repository.glob("*/config.pbtxt")}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._stubs |= children(self._running.pid)
            if self._running.poll() is not None:
                raise ServerError(
                    f"the server ended with status {self._running.returncode} while starting"
                    f"\n{self.explain()}"
                )
            if self._get("/v2/health/ready") is not None:
                break
            time.sleep(0.1)
        else:
            raise ServerError(f"the server was not ready in {seconds:.0f} s\n{self.explain()}")
        self._stubs = {stub for stub in self._stubs if identify(stub.pid) == stub}
        states = self.index()
        missing = {name: states.get(name, "absent") for name in expected}
        missing = {name: state for name, state in missing.items() if state != "READY"}
        if missing:
            raise ServerError(f"not every model is READY: {missing}\n{self.explain()}")

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

    def stop(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """SIGTERM, wait while requests drain, then end whatever is left. Safe to call twice."""
        if self._process is not None:
            self._stubs |= children(self._process.pid)
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(drain_seconds + 5)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            end(self._stubs)
            for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
                region.unlink(missing_ok=True)
        self._stack.close()

    def explain(self, lines: int = 12) -> str:
        """What the log says went wrong: models that did not load, else errors, else its end."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        unloaded = [line.split(STACK)[0] for line in text if "failed to load '" in line]
        errors = [line for line in text if line.startswith("E") or "error:" in line.lower()]
        telling = [line for line in errors if not any(noise in line for noise in NOISE)]
        return "\n".join((unloaded or telling or text)[-lines:])

    def dead_stubs(self) -> tuple[int, ...]:
        """Ids of model processes that are gone. Triton neither restarts them nor says so."""
        return tuple(stub.pid for stub in sorted(self._stubs) if identify(stub.pid) != stub)

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
        python = {**PYTHON_BACKEND, "shm-region-prefix-name": self._shm_prefix}
        return [
            f"--model-repository={repository}",
            f"--http-port={self.options.http_port}",
            f"--grpc-port={self.options.grpc_port}",
            f"--metrics-port={self.options.metrics_port}",
            "--disable-auto-complete-config",
            "--reuse-http-port=false",
            "--reuse-grpc-port=false",
            f"--exit-timeout-secs={DRAIN_SECONDS:.0f}",
            *(f"--backend-config=python,{key}={value}" for key, value in python.items()),
        ]

    def _environment(self, assembly: Assembly) -> dict[str, str]:
        environment = {**os.environ, **assembly.environment, **self.options.environment}
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


def _with_ports(options: ServerOptions) -> ServerOptions:
    """Every port a definite one, all free right now."""
    given = {
        "http_port": options.http_port,
        "grpc_port": options.grpc_port,
        "metrics_port": options.metrics_port,
    }
    for name, port in given.items():
        if port and not port_is_free(port):
            flag = f"--{name.replace('_', '-')}"
            raise ServerError(f"port {port} is taken; choose another with {flag} N")
    chosen = [port for port in given.values() if port]
    if len(set(chosen)) < len(chosen):
        raise ServerError(f"ports must differ: {given}")
    http, grpc, metrics = (
        port or free for port, free in zip(given.values(), free_ports(3), strict=True)
    )
    return replace(options, http_port=http, grpc_port=grpc, metrics_port=metrics)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("0.0.0.0", 0))
        return [int(probe.getsockname()[1]) for probe in probes]

"""Starts, watches, drains and ends a Triton server with our model repository.

**Invariant:** all started processes are ended, including those of the models, which can outlive a
crashed server. `TritonServer` ends them. If this process is killed, the kernel (`tether.py`) ends
the server, and the models end themselves (`lifeline.py`).
"""

from __future__ import annotations

import math
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from vlora import draining, net, server_run
from vlora.config import ADAPTERS_VARIABLE, MODEL_VARIABLE, load_options
from vlora.errors import InvalidArgument, ServerError
from vlora.interpreters import python_environment
from vlora.launcher import processes, run_folder, server_log
from vlora.launcher.assembly import Assembly, assemble
from vlora.launcher.guard import guarded
from vlora.launcher.repository import STANDARD_OUTPUT, ServerOptions, copy_with_overrides
from vlora.model.folder_checks import gpu_count
from vlora.model.weight_files import read_ahead

# Time until the first report about the progress of the start. It doubles with each report.
REPORT_SECONDS = 5.0

# Seconds that the models get to cancel the requests that remain after the grace period.
CANCEL_SECONDS = 5.0

# Seconds to unload the models. Triton also waits this long for idle HTTP connections, since no
# option of Triton 2.51 closes them.
EXIT_SECONDS = 5.0

LISTENERS = ("http", "grpc", "metrics")

PYTHON_BACKEND = {
    # A week instead of 30 s, for large checkpoints. `start_seconds` limits the start.
    "stub-timeout-seconds": "604800",
    # At most 128 blocking calls between models hold a thread each. Sending answers needs further
    # threads.
    "thread-pool-size": "160",
}

# Variables that change Triton beyond its arguments and are not passed on: Vertex AI's mode closes
# HTTP and gRPC, a log that is not escaped can be forged, and Triton's own tests delay requests.
_NOT_PASSED = re.compile(r"AIP_MODE|TRITON_SERVER_ESCAPE_LOG_MESSAGES|TRITONSERVER_.*DELAY_.*")

# What stands before a path in Triton's arguments.
_NAMES_PATH = re.compile(r"--[\w-]+-(cert|key|directory|repository|file)|.*,file")

Report = Callable[[str], None]  # Function that prints a message for the user.


class Addressed:
    """Something that listens at the addresses of its options."""

    options: ServerOptions

    @property
    def http_url(self) -> str:
        return f"{net.reachable_host(self.options.host)}:{self.options.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{net.reachable_host(self.options.host)}:{self.options.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{net.reachable_host(self.options.host)}:{self.options.metrics_port}/metrics"


class TritonServer(Addressed):
    """A server. `with TritonServer(options) as server:` starts it and waits until it is ready.

    Raises ServerError if a port is in use, a library is missing or a model cannot be loaded.
    """

    def __init__(self, options: ServerOptions | None = None) -> None:
        options = options or ServerOptions()
        net.check_host(options.host)
        requested = {f"{name}_port": getattr(options, f"{name}_port") for name in LISTENERS}
        chosen: dict[str, Any] = net.choose_ports(requested, options.host)
        self.options = replace(options, **chosen)
        self.log = Path()
        self._stack = ExitStack()
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._models: dict[psutil.Process, str] = {}
        self._ready_at: int | None = None  # Size of the log in bytes when all models were READY.

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def models(self) -> dict[str, int]:
        """Process ids by model, for the models that have a process."""
        return {name: process.pid for process, name in self._models.items()}

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server has not been started")
        return self._process

    def __enter__(self) -> TritonServer:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def open(self, report: Report | None = None) -> None:
        """Start the server and `wait_ready`. If that fails, end its processes."""
        try:
            self.start()
            self.wait_ready(report)
        except BaseException:
            self.kill()
            raise

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._folder = self._stack.enter_context(run_folder.run_folder())
        self._stack.enter_context(guarded(self._folder))
        log = None
        self.log = self.options.log or self._folder / "tritonserver.log"
        if self.options.keep_log and not self.options.log:
            self.log = run_folder.kept_log(self.options.http_port)
        if self.log != STANDARD_OUTPUT:
            log = self._stack.enter_context(server_log.create(self.log))
        assembly = assemble(self._folder)
        repository = self._repository()
        run_folder.starting_file(self._folder, self.options.grpc_port).touch()
        command = [str(assembly.binary), *assembly.arguments, *self._arguments(repository)]
        environment = self._environment(assembly)
        # Triton's interpreters import from the working folder, which others must not have filled.
        self._process = processes.start_tied(command, environment, log, self._folder)
        begin_to_read(repository, environment)

    def wait_ready(self, report: Report | None = None) -> None:
        """Wait until all models are READY.

        report: called with a sentence about the progress, first after REPORT_SECONDS.

        Raises ServerError with the reason if the server ends, or after `start_seconds`.
        """
        started, report_after = time.monotonic(), REPORT_SECONDS
        limit = self.options.start_seconds
        while self._get("/v2/health/ready") is None:
            status, now = self.poll(), time.monotonic()
            if status is not None:
                how = f"ended with {processes.ended_with(status)} while starting"
                raise ServerError(f"the server {how}\n{self._why_it_did_not_start()}")
            if limit is not None and now - started >= limit:
                raise ServerError(
                    f"the server was not ready within {limit:g} s (--start-timeout):"
                    f" {processes.describe_loading(self.pid)}\n{self._why_it_did_not_start()}"
                )
            if report is not None and now - started >= report_after:
                loading = processes.describe_loading(self.pid)
                report(f"still loading after {now - started:.0f} s: {loading}")
                report_after *= 2
            time.sleep(0.1)
        run_folder.protect_shared_memory(self._folder)
        self._models = processes.model_processes(self.pid)
        models = self.options.models
        # Triton's own report about the whole server does not suffice: a model whose `config.pbtxt`
        # has an unknown field is only logged.
        missing = [name for name in models if self._get(f"/v2/models/{name}/ready") is None]
        if missing:
            raise ServerError(
                f"not READY: the models {', '.join(missing)}\n{self._why_it_did_not_start()}"
            )
        run_folder.starting_file(self._folder, self.options.grpc_port).unlink()
        if not gpu_count():
            server_log.lower_noise(self.log)
        self._ready_at = self.log.stat().st_size if self.log.is_file() else 0

    def poll(self) -> int | None:
        """Return the exit status of the server's process; None while it is running."""
        return self._running.poll()

    def failure(self) -> str | None:
        """Return a sentence that says which process has ended; None while all are running."""
        # Triton neither restarts a model whose process has ended nor reports it.
        status = self.poll()
        if status is not None:
            return f"the server ended unexpectedly with {processes.ended_with(status)}"
        for process, model in self._models.items():
            if not processes.is_alive(process):
                how = processes.how_it_ended(process)
                return f"the process of model '{model}' ended" + (f" with {how}" if how else "")
        return None

    def stop(self, grace_seconds: float | None = None) -> None:
        """Reject new requests, let running ones finish, cancel the rest, and end the server.

        With the option `hand_over`, those that have not begun are refused at once.

        grace_seconds: seconds that running requests get; by default those of the options.
        """
        if self._process is not None and self.is_running:
            grace = self.options.grace_seconds if grace_seconds is None else grace_seconds
            if self.failure() is None:
                # If the models cannot be notified, for example because the disk is full, the server
                # must still be ended.
                with suppress(OSError):
                    self._drain(grace)
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all processes immediately."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            processes.end(run_folder.processes_of(self._folder), grace_seconds=1.0)
            server_run.release_shared_memory(self._folder)
        self._stack.close()

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds + CANCEL_SECONDS
        draining.begin(self._folder, seconds, self.options.hand_over)
        while draining.unfinished(self._folder) and time.monotonic() < deadline:
            if self.failure() is not None:
                return
            time.sleep(0.02)

    def explain(self) -> str:
        """Return the errors in the log, only the new ones if the server was ready; "" for none."""
        if self._ready_at is None:
            return server_log.why_it_did_not_start(server_log.read_end(self.log))
        return server_log.why_it_failed(server_log.read_end(self.log, self._ready_at))

    def _why_it_did_not_start(self) -> str:
        """Return `explain`, and where the log is if it is kept."""
        lines = [self.explain()]
        if self.options.keep_log and self.log.is_file():
            lines.append(f"the server's log is {self.log}")
        return "\n".join(line for line in lines if line)

    def adapter_news(self) -> server_log.AdapterNews:
        """Return the adapters that break and are mended from now on."""
        return server_log.AdapterNews(self.log, self._ready_at or 0)

    def broken_adapters(self) -> tuple[list[str], int]:
        """Return which adapters failed to load and why, and the number of others, from the log."""
        return server_log.broken_adapters(server_log.read_end(self.log))

    def _repository(self) -> Path:
        options = self.options
        if not (options.model_json or options.multi_lora):
            return options.repository.absolute()
        copy = self._folder / "model_repository"
        copy_with_overrides(options.repository, copy, options.model_json, options.multi_lora)
        return copy

    def _arguments(self, repository: Path) -> list[str]:
        prefix = server_run.shared_memory_prefix(self._folder)
        ports = {name: getattr(self.options, f"{name}_port") for name in LISTENERS}
        python = {**PYTHON_BACKEND, "shm-region-prefix-name": prefix}
        return [
            f"--model-repository={repository}",
            *net.listen_arguments(self.options.host, ports),
            *net.closing_arguments(self.options.allow_shared_memory, self.options.triton_arguments),
            "--disable-auto-complete-config",
            "--reuse-http-port=false",
            "--reuse-grpc-port=false",
            # By default, Triton keeps 8 request objects, with their contents, for reuse.
            "--grpc-infer-allocation-pool-size=0",
            # Limits how long the server takes to end after a SIGTERM from another process. `stop`
            # itself sends SIGTERM only when no request is running.
            f"--exit-timeout-secs={math.ceil(self.options.grace_seconds)}",
            *(f"--backend-config=python,{key}={value}" for key, value in python.items()),
            *([] if gpu_count() else ["--allow-gpu-metrics=false"]),
            *with_absolute_paths(self.options.triton_arguments),
        ]

    def _environment(self, assembly: Assembly) -> dict[str, str]:
        given = self.options.environment
        own = {k: v for k, v in python_environment().items() if not _NOT_PASSED.fullmatch(k)}
        environment = {**own, **assembly.environment, **given}
        environment[server_run.RUN_VARIABLE] = str(self._folder)
        model, adapters = self.options.model, self.options.adapters
        for variable, folder in ((MODEL_VARIABLE, model), (ADAPTERS_VARIABLE, adapters)):
            if folder is not None:
                environment[variable] = str(folder.resolve())
            elif model is not None:
                environment.pop(variable, None)
        return environment

    def _get(self, path: str) -> bytes | None:
        try:
            return net.get(f"http://{self.http_url}{path}", seconds=5, direct=True)
        except OSError:
            return None


def begin_to_read(repository: Path, environment: Mapping[str, str]) -> None:
    """Read the model's weights into the page cache on a thread.

    The models' processes import modules for seconds before they read, while the disk would be idle.
    """
    with suppress(InvalidArgument):  # The models say what is wrong with their options.
        model = load_options(repository / "lmm" / "1" / "model.json", environment).model
        # More could push out of the cache what the models have not read yet.
        limit = psutil.virtual_memory().available // 2
        threading.Thread(target=read_ahead, args=[model, limit], daemon=True).start()


def with_absolute_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments of Triton, whose working folder differs, with the paths in them absolute."""
    result = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        name, equals, path = argument.rpartition("=")
        if _NAMES_PATH.fullmatch(name or before) and not path.startswith("-"):
            path = str(Path(path).absolute())
        result.append(f"{name}{equals}{path}")
    return result

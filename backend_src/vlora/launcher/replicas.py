"""Servers on this machine behind Envoy, each on cores of its own. They are watched, restarted and
stopped here.

Envoy's addresses are the only ones that clients need. A server's status decides whether Envoy sends
requests to it: it reads the servers from files that are written whenever a status changes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TypeVar

from vlora import net
from vlora.errors import ServerError
from vlora.interpreters import python_environment
from vlora.launcher import envoy
from vlora.launcher.processes import ended_with, start_tied
from vlora.launcher.replica_metrics import MetricsServer
from vlora.launcher.repository import STANDARD_OUTPUT, ServerOptions
from vlora.launcher.run_folder import run_folder
from vlora.launcher.server import LISTENERS, Addressed, TritonServer
from vlora.launcher.supervisor import WATCH_SECONDS, RestartPolicy, Supervisor, signals_interrupt
from vlora.model.folder_checks import gpu_count
from vlora.server_run import PEERS_VARIABLE

MAX_ENVOY_THREADS = 4
ENVOY_SECONDS = 20.0  # Maximum time from Envoy's start to its first answer; it takes half a second.
# Linux limits the path of a socket to 107 bytes, with `/PID.cancels` at its end.
MAX_FOLDER_LENGTH = 107 - len("/4194304.cancels")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

Say = Callable[[str], None]
Item = TypeVar("Item")


class Status(Enum):
    """Whether Envoy sends requests to a replica."""

    DOWN = 0
    SERVING = 1
    DRAINING = 2  # It finishes those that it has.


class Replica:
    """A server that a thread runs, with all its processes, on its own cores."""

    def __init__(
        self,
        name: str,
        options: ServerOptions,
        cores: Sequence[int],
        say: Say,
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.cores = cores
        self.status = Status.DOWN
        self.error: Exception | None = None  # Why the thread has ended.
        self.server = self._make(options)
        self._say: Say = lambda text: say(f"replica {name}: {text}")
        self._changed = changed
        self._interrupt = threading.Event()
        self._ends = False
        self._was_ready = False
        self._thread = threading.Thread(target=self._run, name=f"replica {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def restart(self) -> None:
        """Let the server hand its waiting requests over and finish the rest, then start another."""
        self._set_status(Status.DRAINING)
        self._interrupt.set()

    def stop(self) -> None:
        """Let the server finish all requests, without waiting for that."""
        self.server.options = replace(self.server.options, hand_over=False)
        self._ends = True
        self._interrupt.set()
        if self.status is Status.DOWN:
            self._kill()

    def kill(self) -> None:
        """End the server at once, and wait for the thread."""
        self.stop()
        while self.is_alive:
            self._kill()
            self._thread.join(WATCH_SECONDS)
        self._kill()

    def _kill(self) -> None:
        if self.server.is_running:
            self.server.kill()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        # What the thread starts inherits its cores.
        os.sched_setaffinity(0, self.cores)
        policy, options = RestartPolicy(), self.server.options
        # One for all restarts: it tries again to start a server only if one has been ready before.
        supervisor = Supervisor(options, self._say, policy, self._make, self._sleep)
        try:
            while True:
                self._interrupt.clear()
                if self._ends:
                    return
                supervisor.supervise(self._mark_ready)
        except Exception as error:  # Also a full disk; the others go on.
            self.error = error
            # If it was never ready, `Replicas` raises the error.
            if self._was_ready and not self._ends:
                self._say(str(error))

    def _mark_ready(self, server: TritonServer, seconds: float) -> None:
        self._was_ready = True

    def _sleep(self, seconds: float) -> None:
        if self._interrupt.wait(seconds):
            raise KeyboardInterrupt

    def _make(self, options: ServerOptions) -> ReplicaServer:
        self.server = ReplicaServer(options, self._set_status)
        return self.server

    def _set_status(self, status: Status) -> None:
        if status is not self.status:
            self.status = status
            self._changed()


class ReplicaServer(TritonServer):
    """A server that tells its status."""

    def __init__(self, options: ServerOptions, tell: Callable[[Status], None]) -> None:
        super().__init__(options)
        self._tell = tell

    def open(self, report: Say | None = None) -> None:
        super().open(report)
        self._tell(Status.SERVING)

    def stop(self, grace_seconds: float | None = None) -> None:
        self._tell(Status.DRAINING)
        super().stop(grace_seconds)

    def kill(self) -> None:
        self._tell(Status.DOWN)
        super().kill()


class Replicas(Addressed):
    """Runs `count` servers behind Envoy until a signal. SIGUSR1 restarts them one after the other.

    The addresses of the options are Envoy's, and that of the metrics of all replicas. `options`,
    the URLs and `failure` are those that a user of one server expects.
    """

    def __init__(self, options: ServerOptions, count: int, say: Say, *, on_gpus: bool) -> None:
        if options.allow_shared_memory:
            raise ServerError(
                "--allow-shared-memory does not work with --replicas, since memory that a client"
                " registers reaches only one of them; use one server, or send encoded images"
            )
        for one in options.triton_arguments:
            if one.startswith("--grpc-use-ssl") and not one.endswith(("=false", "=0")):
                raise ServerError(
                    f"{one} does not work with --replicas, since Envoy does not encrypt what it"
                    " sends to them; use one server, or let a proxy in front of Envoy encrypt"
                )
        self._program = envoy.program()
        net.check_host(options.host)
        ports = {f"{name}_port": getattr(options, f"{name}_port") for name in LISTENERS}
        chosen = net.choose_ports(ports, options.host)
        self.options = replace(
            options,
            http_port=chosen["http_port"],
            grpc_port=chosen["grpc_port"],
            metrics_port=chosen["metrics_port"],
        )
        self._say = say
        self._cores = shares_of(sorted(os.sched_getaffinity(0)), count, "cores")
        self._gpus = shares_of(_gpus(), count, "GPUs") if on_gpus else []
        # Replicas that a rolling restart has left; None if none was asked for.
        self._to_restart: list[Replica] | None = None
        self._proxy: subprocess.Popen[bytes] | None = None
        self._writing = threading.Lock()
        self._unwritten = False
        self._folder = Path()
        self.replicas: list[Replica] = []

    @property
    def log(self) -> Path:
        return self.replicas[0].server.log

    def broken_adapters(self) -> tuple[list[str], int]:
        return self.replicas[0].server.broken_adapters()

    def failure(self) -> str | None:
        """Return a sentence if no replica is left; None otherwise."""
        if any(one.is_alive for one in self.replicas):
            return None
        return "all replicas have failed"

    def run(self, announce: Callable[[Replicas, float], None]) -> None:
        """Serve until SIGINT, SIGTERM or SIGHUP, and then let running requests finish.

        A second signal ends them at once. Raises ServerError if a replica does not start, or if
        none is left.
        """
        with signals_interrupt(), self._restarting_on_signal(), ExitStack() as stack:
            started = time.monotonic()
            self._folder = stack.enter_context(run_folder())
            if len(str(self._folder)) > MAX_FOLDER_LENGTH:
                raise ServerError(
                    f"the folder {self._folder} has a long path, in which Linux opens no sockets;"
                    " set TMPDIR to a shorter one"
                )
            stack.callback(self._end_envoy)
            stack.enter_context(
                MetricsServer(self.options.host, self.options.metrics_port, self._metrics)
            )
            try:
                self._start()
                announce(self, time.monotonic() - started)
                self._watch()
            except KeyboardInterrupt:
                self._stop()
            finally:
                for one in self.replicas:
                    one.kill()

    def _start(self) -> None:
        shared = [self._options_of(index) for index in range(len(self._cores))]
        self.replicas = [
            Replica(str(index), options, self._cores[index], self._say, self._write)
            for index, options in enumerate(shared)
        ]
        ports = [self.options.grpc_port, self.options.http_port]
        envoy.write_configuration(self._folder, self.options.host, ports, health_checks=False)
        self._write()
        for one in self.replicas:
            one.start()
        while any(one.status is not Status.SERVING for one in self.replicas):
            for one in self.replicas:
                if one.error is not None:
                    raise one.error
            time.sleep(0.1)
        self._start_envoy()
        self._wait_for_envoy()

    def _options_of(self, index: int) -> ServerOptions:
        options = self.options
        environment = {**options.environment, PEERS_VARIABLE: str(self._folder)}
        if self._gpus:
            # A server has one engine, which uses one GPU.
            environment[VISIBLE_GPUS] = self._gpus[index][0]
        log = options.log
        if log is not None and log != STANDARD_OUTPUT:
            log = log.with_name(f"{log.name}.{index}")
        return replace(
            options,
            host=net.LOOPBACK,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            log=log,
            environment=environment,
            hand_over=True,
        )

    def _write(self) -> None:
        """Tell Envoy the servers. If that fails, as on a full disk, `_watch` repeats it."""
        try:
            self._write_servers()
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self._say(f"Envoy cannot be told which servers are up, trying again: {error}")
            self._unwritten = True

    def _write_servers(self) -> None:
        with self._writing:
            servers = [
                envoy.Server(
                    net.LOOPBACK,
                    one.server.options.http_port,
                    one.server.options.grpc_port,
                    one.status is Status.DRAINING,
                )
                for one in self.replicas
                if one.status is not Status.DOWN
            ]
            envoy.write_servers(self._folder, servers)

    def _metrics(self) -> dict[str, str]:
        up = (one for one in self.replicas if one.status is not Status.DOWN)
        return {one.name: one.server.metrics_url for one in up}

    def _start_envoy(self) -> None:
        threads = min(MAX_ENVOY_THREADS, len(os.sched_getaffinity(0)))
        command = [str(self._program), "-c", str(self._folder / envoy.CONFIGURATION)]
        command += ["--concurrency", str(threads), "--disable-hot-restart", "--log-level", "error"]
        self._proxy = start_tied(command, python_environment(), None, self._folder)

    def _end_envoy(self) -> None:
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait()

    def _envoy_end(self) -> str | None:
        """Return how Envoy has ended; None while it runs."""
        status = None if self._proxy is None else self._proxy.poll()
        return None if status is None else f"Envoy ended with {ended_with(status)}"

    def _wait_for_envoy(self) -> None:
        deadline = time.monotonic() + ENVOY_SECONDS
        while True:
            try:
                net.get(f"http://{self.http_url}/v2/health/ready", seconds=5, direct=True)
                return
            except OSError as error:
                if (end := self._envoy_end()) is not None:
                    raise ServerError(end) from None
                if time.monotonic() > deadline:
                    raise ServerError(f"Envoy does not answer: {error}") from None
            time.sleep(0.05)

    def _watch(self) -> None:
        while (failure := self.failure()) is None:
            time.sleep(WATCH_SECONDS)
            if (end := self._envoy_end()) is not None:
                self._say(f"{end}; starting it again")
                self._start_envoy()
            if self._unwritten:
                self._write()
            self._restart_next()
        raise ServerError(failure)

    def _restart_next(self) -> None:
        """Restart the next replica that waits for it, if all others serve."""
        if self._to_restart is None:
            return
        if any(one.error is not None for one in self.replicas):
            self._say("a replica has failed, so no other one is restarted")
            self._to_restart = None
        elif any(one.status is not Status.SERVING for one in self.replicas):
            return
        elif not self._to_restart:
            self._say("all replicas have been restarted")
            self._to_restart = None
        else:
            following = self._to_restart.pop(0)
            self._say(f"restarting replica {following.name}")
            following.restart()

    @contextmanager
    def _restarting_on_signal(self) -> Iterator[None]:
        def restart(number: int, frame: FrameType | None) -> None:
            self._to_restart = [*self.replicas]

        before = signal.signal(signal.SIGUSR1, restart)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    def _stop(self) -> None:
        for one in self.replicas:
            one.stop()
        try:
            for one in self.replicas:
                one.join()
        except KeyboardInterrupt:
            self._say("stopping at once")


def shares_of(items: Sequence[Item], count: int, name: str) -> list[Sequence[Item]]:
    """Split a list into `count` parts of about the same length. Raises ServerError if too short."""
    if len(items) < count:
        raise ServerError(f"--replicas {count} needs as many {name}; there are {len(items)}")
    bounds = [len(items) * index // count for index in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def _gpus() -> list[str]:
    given = os.environ.get(VISIBLE_GPUS)
    return given.split(",") if given else [str(index) for index in range(gpu_count())]

"""The gateway that `vlora serve` runs in a separate process."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from vlora.errors import pause_after
from vlora.interpreters import python_command, python_environment
from vlora.launcher import server_log
from vlora.launcher.processes import ended_with, start_tied
from vlora.launcher.run_folder import root_of_runs
from vlora.net import check_host, check_keys, choose_ports, get, reachable_host

# Shortest and longest wait before a gateway that has ended is restarted. It doubles each time.
FIRST_WAIT_SECONDS = 1.0
MAX_WAIT_SECONDS = 30.0

# Maximum time from the start of a gateway to its first answer. It takes two seconds on idle cores.
READY_SECONDS = 60.0

STOP_SECONDS = 5.0  # No request is running then, because the server has been stopped.


class GatewayProcess:
    """Runs `vlora gateway` from `start` to the end of a `with` block, and restarts it if it ends.

    url: address on which the gateway listens once it has started.
    log: file for its output, with a line for each request; None: this process's output.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: Path | None,
        say: Callable[[str], None],
        log_to_file: bool = True,
        arguments: Sequence[str] = (),
    ) -> None:
        """Choose the port. Raise ServerError for an address that cannot be used, or needs keys.

        arguments: further arguments of `vlora gateway`.
        """
        check_host(host)
        check_keys(host, keys, "--gateway-keys")
        chosen = choose_ports({"gateway_port": port}, host)["gateway_port"]
        self.url = f"http://{reachable_host(host)}:{chosen}"
        self.log = root_of_runs() / f"gateway-{chosen}.log" if log_to_file else None
        self._output: IO[bytes] | None = None
        self._arguments = ["--host", host, "--port", str(chosen), *arguments]
        if keys is not None:
            self._arguments += ["--keys", str(keys.absolute())]
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._changed = threading.Condition()

    def start(self, grpc_url: str, metrics_url: str) -> None:
        """Start the gateway for the server at these addresses. A second call does nothing."""
        if self._process is not None:
            return
        command = python_command("vlora.cli", "gateway", *self._arguments)
        command += ["--grpc", grpc_url, "--metrics-url", metrics_url]
        self._output = None if self.log is None else server_log.create(self.log)
        self._process = self._started(command)
        threading.Thread(target=self._watch, args=[command], name="gateway", daemon=True).start()

    def wait_ready(self, wanted: Callable[[], bool]) -> bool:
        """Return whether the gateway answers before READY_SECONDS are over or `wanted` is false."""
        deadline = time.monotonic() + READY_SECONDS
        while wanted() and time.monotonic() < deadline:
            with suppress(OSError):
                get(f"{self.url}/health", seconds=5, direct=True)
                return True
            time.sleep(0.1)
        return False

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            process = self._process
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()
        if self._output is not None:
            self._output.close()

    def _started(self, command: list[str]) -> subprocess.Popen[bytes]:
        # The folder of all runs, because the gateway outlives those of servers that are restarted.
        return start_tied(command, python_environment(), self._output, root_of_runs())

    def _keeps_running(self, process: subprocess.Popen[bytes]) -> bool:
        return not self._stopping and process.poll() is None

    def _watch(self, command: list[str]) -> None:
        failures, process = 0, self._process
        assert process is not None
        while True:
            status = process.wait()
            failures += 1
            wait = pause_after(failures, FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS)
            with self._changed:
                if not self._stopping:
                    how = ended_with(status)
                    where = "" if self.log is None else f" (its log is {self.log})"
                    again = f"starting it again in {wait:.0f} s{where}"
                    self._say(f"the gateway ended with {how}; {again}")
                if self._changed.wait_for(lambda: self._stopping, wait):
                    return
                try:
                    process = self._process = self._started(command)
                except OSError as error:
                    self._say(f"the gateway cannot be started: {error.strerror}")
            if self.wait_ready(partial(self._keeps_running, process)):
                self._say(f"the gateway answers again at {self.url}/v1")

"""The gateway that `vlora serve` runs in a separate process."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vlora.interpreters import python_command, python_environment
from vlora.launcher.processes import ended_with, start_tied
from vlora.launcher.run_folder import root_of_runs
from vlora.net import check_host, check_keys, choose_ports, reachable_host

# Shortest and longest wait before a gateway that has ended is restarted. It doubles each time.
FIRST_WAIT_SECONDS = 1.0
MAX_WAIT_SECONDS = 30.0

STOP_SECONDS = 5.0  # No request is running then, because the server has been stopped.


class GatewayProcess:
    """Runs `vlora gateway` from `start` to the end of a `with` block, and restarts it if it ends.

    url: address on which the gateway listens once it has started.
    """

    def __init__(self, host: str, port: int, keys: Path | None, say: Callable[[str], None]) -> None:
        """Choose the port. Raise ServerError for an address that cannot be used, or needs keys."""
        check_host(host)
        check_keys(host, keys, "--gateway-keys")
        chosen = choose_ports({"gateway_port": port}, host)["gateway_port"]
        self.url = f"http://{reachable_host(host)}:{chosen}"
        self._arguments = ["--host", host, "--port", str(chosen)]
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
        self._process = _started(command)
        threading.Thread(target=self._watch, args=[command], name="gateway", daemon=True).start()

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

    def _watch(self, command: list[str]) -> None:
        wait = FIRST_WAIT_SECONDS
        while self._process is not None:
            status = self._process.wait()
            with self._changed:
                if not self._stopping:
                    how = ended_with(status)
                    self._say(f"the gateway ended with {how}; starting it again in {wait:.0f} s")
                if self._changed.wait_for(lambda: self._stopping, wait):
                    return
                try:
                    self._process = _started(command)
                except OSError as error:
                    self._say(f"the gateway cannot be started: {error.strerror}")
            wait = min(2 * wait, MAX_WAIT_SECONDS)


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    # The folder of all runs, because the gateway outlives those of servers that are restarted.
    return start_tied(command, python_environment(), None, root_of_runs())

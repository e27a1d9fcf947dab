"""`vlora serve`: a server in the foreground, watched, stopped by signals, and started again.

Told what to say through `say`, so that it knows nothing of terminals.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from vlora.launcher.assembly import ServerError
from vlora.launcher.server import ServerOptions, TritonServer

WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class RestartPolicy:
    """When a server that went down is started again.

    A failure within `quick_seconds` of the start counts; after `most` of them in a row there is
    none any more. Before the n-th in a row it waits first_wait · 2ⁿ⁻¹ seconds, at most
    `longest_wait`.
    """

    most: int = 5
    quick_seconds: float = 60.0
    first_wait: float = 1.0
    longest_wait: float = 30.0

    def wait(self, failures: int) -> float:
        return min(self.first_wait * 2.0 ** (failures - 1), self.longest_wait)


Announce = Callable[[TritonServer, float], None]
"""Told of a server whenever it is ready, with the seconds that took."""


class Supervisor:
    """Serves with these options until a signal or a failure ends it.

    restart: when to start again; None ends with the first server that goes down. make: makes a
    server that has not started, as `TritonServer` does.
    """

    def __init__(
        self,
        options: ServerOptions,
        say: Callable[[str], None],
        restart: RestartPolicy | None = None,
        make: Callable[[ServerOptions], TritonServer] = TritonServer,
    ) -> None:
        self._options = options
        self._say = say
        self._restart = restart
        self._make = make
        self._ready = False

    def run(self, announce: Announce) -> None:
        """Serve.

        Returns after SIGINT, SIGTERM or SIGHUP, when running requests have ended; a second signal
        ends them at once. Raises ServerError when the first server does not come up, and when one
        goes down and is not to be started again.
        """
        failures = 0
        with _signals_interrupt():
            while True:
                started = time.monotonic()
                try:
                    self._serve(announce)
                    return
                except ServerError as error:
                    if self._restart is None or not self._ready:
                        raise
                    quick = time.monotonic() - started < self._restart.quick_seconds
                    failures = failures + 1 if quick else 1
                    if failures >= self._restart.most:
                        each = f"{self._restart.quick_seconds:.0f} s after its start"
                        raise ServerError(
                            f"{error}\ngiving up: it went down {failures} times, each within {each}"
                        ) from None
                    wait = self._restart.wait(failures)
                    self._say(f"{error}\nstarting again in {wait:.0f} s")
                try:
                    time.sleep(wait)
                except KeyboardInterrupt:
                    return

    def _serve(self, announce: Announce) -> None:
        """Until a signal; raises ServerError when the server goes down before."""
        server = self._make(self._options)
        self._say("starting the server …")
        started = time.monotonic()
        try:
            server.__enter__()
            self._options = server.options  # with the ports that were chosen
            self._ready = True
            announce(server, time.monotonic() - started)
            while (failure := server.failure()) is None:
                time.sleep(WATCH_SECONDS)
            explained = server.explain()
            server.kill()
            log = f"its log is {self._log_of(server)}"
            lines = (f"{failure}; the server is down", explained, log)
            raise ServerError("\n".join(line for line in lines if line))
        except KeyboardInterrupt:
            self._stop(server)

    def _stop(self, server: TritonServer) -> None:
        if server.is_running:
            grace = server.options.grace_seconds
            self._say(
                f"stopping: new requests are refused, running ones get {grace:g} s to finish"
                " (Ctrl-C again: at once)"
            )
        else:
            self._say("stopping: the server was not ready yet")
        try:
            server.stop()
        except KeyboardInterrupt:
            self._say("ending at once")
            server.kill()
        self._say("stopped")

    def _log_of(self, server: TritonServer) -> Path:
        """Where the log is now: put aside where a next server would begin it anew."""
        if self._restart is None or not server.log.is_file():
            return server.log
        return server.log.replace(server.log.with_name(f"{server.log.name}.before"))


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """The first and the second signal interrupt; later ones are ignored, so that what the second
    began is finished.

    SIGINT needs a handler of ours too: a script's `vlora serve &` inherits it as ignored. SIGHUP
    stays ignored where it was (nohup).
    """
    left = 2

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise KeyboardInterrupt

    signals = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    before = {each: signal.signal(each, interrupt) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

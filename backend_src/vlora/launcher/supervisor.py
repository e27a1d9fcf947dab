"""Runs a server in the foreground: watches it, stops it on signals, and restarts it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from vlora.errors import MAX_NAMES, ServerError, pause_after
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

WATCH_SECONDS = 0.5  # Interval at which the server's processes are checked.


@dataclass(frozen=True)
class RestartPolicy:
    """Conditions and delays for restarting a server that has failed.

    max_failures: number of failures in a series after which the server is not restarted. Failures
        within `quick_seconds` after a start form a series; any other failure begins a new one.
    first_wait: seconds before the first restart of a series. The wait doubles up to `max_wait`.
    """

    max_failures: int = 5
    quick_seconds: float = 60.0
    first_wait: float = 1.0
    max_wait: float = 30.0


# Function that is called with a server that has become ready, and the seconds of its start.
Announce = Callable[[TritonServer, float], None]


class Supervisor:
    """Runs servers with these options until a signal or a failure.

    restart: None never restarts a server that has failed.
    sleep: waits for these seconds; raises KeyboardInterrupt to stop the server.
    """

    def __init__(
        self,
        options: ServerOptions,
        say: Callable[[str], None],
        restart: RestartPolicy | None = None,
        make: Callable[[ServerOptions], TritonServer] = TritonServer,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._options = options
        self._say = say
        self._restart = restart
        self._make = make
        self._sleep = sleep
        self._ready = False

    def run(self, announce: Announce) -> None:
        """Serve until a signal or a failure.

        Returns after SIGINT, SIGTERM or SIGHUP, once the running requests have ended. A second
        signal ends them immediately. Raises the errors of `supervise`.
        """
        with signals_interrupt():
            self.supervise(announce)

    def supervise(self, announce: Announce) -> None:
        """Serve until a KeyboardInterrupt or a failure.

        Raises ServerError or OSError if the first server does not start, or if one fails and is not
        restarted.
        """
        failures = 0
        while True:
            started = time.monotonic()
            try:
                self._serve(announce)
                return
            except (ServerError, OSError) as error:  # OSError: such as a full disk
                if self._restart is None or not self._ready:
                    raise
                quick = time.monotonic() - started < self._restart.quick_seconds
                failures = failures + 1 if quick else 1
                if failures >= self._restart.max_failures:
                    raise ServerError(
                        f"{error}\ngiving up: the server failed {failures} times in a row,"
                        f" each time within {self._restart.quick_seconds:.0f} s after its start"
                    ) from None
                wait = pause_after(failures, self._restart.first_wait, self._restart.max_wait)
                self._say(f"{error}\nrestarting in {wait:.0f} s")
            try:
                self._sleep(wait)
            except KeyboardInterrupt:
                return

    def _serve(self, announce: Announce) -> None:
        server = self._make(self._options)
        self._say("starting the server …")
        started = time.monotonic()
        try:
            server.open(self._say)
            # A restarted server uses the same ports, even if they were chosen because of port 0.
            self._options = server.options
            self._ready = True
            announce(server, time.monotonic() - started)
            news = server.adapter_news()
            while (failure := server.failure()) is None:
                sentences = news.read()
                for sentence in sentences[:MAX_NAMES]:
                    self._say(sentence)
                if len(sentences) > MAX_NAMES:
                    self._say("… (`vlora adapters check` with the same options names all)")
                self._sleep(WATCH_SECONDS)
            explained = server.explain()
            server.kill()
            log = f"the server's log is {self._log_of(server)}"
            lines = (f"{failure}; the server is down", explained, log)
            raise ServerError("\n".join(line for line in lines if line))
        except KeyboardInterrupt:
            self._stop(server)

    def _stop(self, server: TritonServer) -> None:
        if server.is_running:
            grace = server.options.grace_seconds
            self._say(
                f"stopping: new requests are rejected, running ones get {grace:g} s to finish"
                " (press Ctrl-C again to stop at once)"
            )
        else:
            self._say("stopping: the server was not ready yet")
        try:
            server.stop()
        except KeyboardInterrupt:
            self._say("stopping at once")
            server.kill()
        self._say("stopped")

    def _log_of(self, server: TritonServer) -> Path:
        # A restarted server overwrites its log, so the present log is renamed if there is a
        # restart.
        if self._restart is None or not server.log.is_file():
            return server.log
        return server.log.replace(server.log.with_name(f"{server.log.name}.before"))


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first and on the second signal within the block."""
    left = 2  # Later signals are ignored, so that the shutdown by the second one can finish.

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise KeyboardInterrupt

    # SIGINT needs a handler, because `vlora serve &` in a script inherits it as ignored. SIGHUP
    # stays ignored if it was ignored before (nohup).
    signals = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    # Restarts replicas, which handle it themselves. It must not end a server that has none.
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

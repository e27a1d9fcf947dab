"""What every exporter of metrics is made of: the server's registry as they see it, and the clock.

Each change is a message to the server, so values that stay are not sent.
Not known here: Triton; it is reached through `Registry`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0


class Metric(Protocol):
    """One time series. set is for gauges, increment for counters, observe for histograms."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Registry(Protocol):
    """Makes metrics: one family per name, one metric per label set."""

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Metric: ...


class Exporter(ABC):
    """Metrics of one model. `flush` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing = False

    def flush(self) -> None:
        """Bring the server's values up to date. Never raises: what fails is logged, once until it
        works again, and tried anew with the next call."""
        self._safely(self._write)

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            with self._lock:
                write()
        except Exception:
            if not self._failing:
                log.exception("metrics could not be written; this goes on until they can")
            self._failing = True
        else:
            self._failing = False

    @abstractmethod
    def _write(self) -> None: ...


class Refresher:
    """Flushes an exporter once a second on its own thread, until closed."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(REFRESH_SECONDS):
            self._exporter.flush()


class Level:
    """A gauge or a counter that is brought to a value; the server hears of changes alone."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._value = 0.0

    def set(self, value: float) -> None:
        if value != self._value:
            self._metric.set(value)
            self._value = value

    def raise_to(self, total: float) -> None:
        if total > self._value:
            self._metric.increment(total - self._value)
            self._value = total

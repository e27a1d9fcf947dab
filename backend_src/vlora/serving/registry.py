"""Base class of the metric exporters, and the interface of the registry that they write to.

Every change of a value is a message to the server, so unchanged values are not sent. This module
does not depend on Triton; `triton/metrics.py` implements `Registry` with Triton's metrics.
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
    """One time series: a gauge has `set`, a counter `increment`, and a histogram `observe`."""

    def set(self, value: float) -> None: ...
    def increment(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Registry(Protocol):
    """Factory of metrics.

    A metric family has a name. Each set of labels in a family is one metric.
    """

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Metric: ...
    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Metric: ...
    def drop(self, name: str) -> None:
        """Remove a family. Its metrics must not be used any more."""


class Exporter(ABC):
    """Exports the metrics of one model. `flush` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing = False

    def flush(self) -> None:
        """Write the present values to the server; never raises.

        Of several failures in a row, only the first is logged.
        """
        self._safely(self._write)

    def _safely(self, write: Callable[[], None]) -> None:
        """Call a function that writes metrics, and catch its errors.

        Of several failures in a row, only the first is logged.
        """
        try:
            with self._lock:
                write()
        except Exception:
            if not self._failing:
                log.exception("could not write metrics; retrying every second")
            self._failing = True
        else:
            self._failing = False

    @abstractmethod
    def _write(self) -> None: ...


class Refresher:
    """Flushes an exporter once a second on its own thread, until it is closed."""

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
    """A gauge or counter that is set to absolute values. Only changes are sent to the server."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._value = 0.0

    def set(self, value: float) -> None:
        if value != self._value:
            self._metric.set(value)
            self._value = value

    def raise_to(self, total: float) -> None:
        """Increment a counter so that it has this total."""
        if total > self._value:
            self._metric.increment(total - self._value)
            self._value = total

"""Counts of the errors that a model's process sends, by code, and their metric.

An error may pass through several models on its way to the client (encoder → `lmm` → `lmm_unary`).
Only the model that raised the error counts it. So the sum over all models is the number of failed
requests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from vlora.errors import BY_CODE, VLoraError
from vlora.serving.registry import Exporter, Level, Registry

NAME = "vlora:request_errors_total"
HELP = "Requests ended by an error that this model raised, by the error's code."


class ErrorCounts:
    """Number of errors that a process has sent, by code. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, error: VLoraError) -> None:
        """Count `error`, unless another model has counted it."""
        if not error.counted_elsewhere:
            with self._lock:
                self._counts[error.code] += 1

    def __getitem__(self, code: str) -> int:
        with self._lock:
            return self._counts[code]


class ErrorExporter(Exporter):
    """Exports one counter per error code.

    All counters exist from the start, because monitoring sees an error only as an increase of a
    counter.
    """

    def __init__(self, registry: Registry, labels: Mapping[str, str], counts: ErrorCounts) -> None:
        super().__init__()
        self._counts = counts
        self._counters = {
            code: Level(registry.counter(NAME, HELP, {**labels, "code": code})) for code in BY_CODE
        }

    def _write(self) -> None:
        for code, counter in self._counters.items():
            counter.raise_to(self._counts[code])

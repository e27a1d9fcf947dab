"""Errors that clients were told, by code: counted by the model that found each, exported by it.

An error passes through several models on its way to the client (encoder → `lmm` → `lmm_unary`);
who passes one on does not count it again, so that the sum over models is that of failed requests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from vlora.errors import BY_CODE, VLoraError
from vlora.serving.registry import Exporter, Level, Registry

NAME = "vlora:request_errors_total"
HELP = "Requests ended by an error that this model found, by the error's code."


class ErrorCounts:
    """What a process has told its clients. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, error: VLoraError) -> None:
        """Count `error`, unless another model has."""
        if not error.counted_elsewhere:
            with self._lock:
                self._counts[error.code] += 1

    def __getitem__(self, code: str) -> int:
        with self._lock:
            return self._counts[code]


class ErrorExporter(Exporter):
    """One counter a code, all of them there from the start, so that the first error is a change."""

    def __init__(self, registry: Registry, labels: Mapping[str, str], counts: ErrorCounts) -> None:
        super().__init__()
        self._counts = counts
        self._counters = {
            code: Level(registry.counter(NAME, HELP, {**labels, "code": code})) for code in BY_CODE
        }

    def _write(self) -> None:
        for code, counter in self._counters.items():
            counter.raise_to(self._counts[code])

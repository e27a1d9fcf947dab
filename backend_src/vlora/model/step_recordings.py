"""Recorded kernel calls of decoding steps on the CPU.

Each kernel call from Python costs about ten microseconds, together a tenth of the step of a small
model. So the calls of the layers are recorded once, and one call of the compiled core repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from vlora import native
from vlora.atmm.types import Segments
from vlora.model.attention import AttentionPlan
from vlora.model.rotary import Rotary
from vlora.model.switcher import Active

# Maximum number of recordings. Beyond it, the least recently used one is discarded.
MAX_RECORDINGS = 64
# Maximum number of rows of a recorded step. In larger steps, Python takes little of the time.
MAX_ROWS = 64
_enabled = True


class RecordingKey(NamedTuple):
    """Properties on which the kernel calls of a step depend.

    active: `id` of the active weights.
    adapted: whether the step applies an adapter to each group of projections; () without segments.
    addresses: addresses of the memory that the calls read and write.
    """

    rows: int
    active: int
    adapted: tuple[bool, ...]
    addresses: tuple[int, ...]


class _Recorded(NamedTuple):
    """A recording, and the weights that it reads. The reference keeps their `id` in use."""

    calls: Any
    active: Active


class StepRecordings:
    """The recordings of one decoder, for the engine's thread only. `repeated` counts the steps that
    a recording has computed.
    """

    def __init__(self) -> None:
        self.repeated = 0
        # Recordings by key, the least recently used first.
        self._recorded: dict[RecordingKey, _Recorded] = {}

    def run(
        self,
        key: RecordingKey,
        active: Active,
        attention: AttentionPlan,
        rotary: Rotary,
        segments: Segments,
        compute: Callable[[], object],
    ) -> None:
        """Compute the layers of a step: repeat the recording of `key`, or call `compute`, which
        only makes the kernel calls of the layers, and record it. `active` is what the step reads.
        """
        recorded = self._recorded.pop(key, None)
        if recorded is None:
            recording = _record(compute)
            while len(self._recorded) >= MAX_RECORDINGS:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = _Recorded(recording, active)
            return
        self._recorded[key] = recorded
        if recorded.calls.complete:
            attention.repeat(recorded.calls, rotary, segments)
            self.repeated += 1
        else:
            compute()


def _record(compute: Callable[[], object]) -> Any:
    recording = native.kernels().steps.Recording()
    recording.begin()
    try:
        compute()
    finally:
        recording.end()
    return recording


def enabled() -> bool:
    return _enabled


@contextmanager
def disabled() -> Iterator[None]:
    """Compute each step call by call while the context is open, for comparisons and timers."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before

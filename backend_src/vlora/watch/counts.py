"""Counts of a stream, and of what is asked about it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_LAGS = 10_000  # Lags of the last answers, of which the summary has quantiles.


@dataclass
class StreamCounts:
    """Counts of the connections and frames of a stream since it was added.

    reconnections: connections after the first one. gaps: jumps of the stream, and times at which
        it was not there. broken: chunks without all frames. damaged: frames left out because
        packets of theirs, or of frames that they depend on, were lost.
    """

    reconnections: int = 0
    gaps: int = 0
    broken: int = 0
    damaged: int = 0


@dataclass
class Counts:
    """Counts of the chunks of a camera, or of one of its questions, since it was added.

    chunks: complete chunks. answered, skipped, errors: chunks that were answered, that the gate
        skipped, and whose request failed. lags: seconds from the last frame to the answer.
    drops: chunks that were not asked about, because a newer one replaced them, or that the server
        gave up. yielded: drops while other cameras had priority.
    """

    chunks: int = 0
    answered: int = 0
    skipped: int = 0
    errors: int = 0
    drops: int = 0
    yielded: int = 0
    lags: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LAGS))

    @property
    def share_skipped(self) -> float:
        return self.skipped / max(1, self.skipped + self.answered)

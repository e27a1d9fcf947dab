"""Counts of a stream, and of what is asked about it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_LAGS = 10_000  # Lags of the last answers, of which the summary has quantiles.
# A camera counts as overloaded if it dropped more than this share of its chunks in this time, as in
# the alerting rules, and more than a few.
OVERLOAD = 0.2
RECENT_SECONDS = 300.0
LEAST_DROPS = 2
LOOK_SECONDS = 10.0


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
    # Times with the chunks and drops before them, of the last RECENT_SECONDS.
    looks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def count_chunk(self, is_dropped: bool, now: float) -> None:
        """Count a new chunk. is_dropped: whether the one before it was never asked about."""
        looks = self.looks
        if not looks or now - looks[-1][0] >= LOOK_SECONDS:
            looks.append((now, self.chunks, self.drops))
        while now - looks[0][0] > RECENT_SECONDS:
            looks.popleft()
        self.chunks += 1
        self.drops += is_dropped

    @property
    def is_overloaded(self) -> bool:
        """Whether many of the last chunks were dropped."""
        _, chunks, drops = self.looks[0] if self.looks else (0.0, 0, 0)
        return self.drops - drops > max(LEAST_DROPS, OVERLOAD * (self.chunks - chunks))

    @property
    def share_skipped(self) -> float:
        return self.skipped / max(1, self.skipped + self.answered)

"""Cutting of a stream of frames into chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vlora.watch.pixels import Pixels, View

T = TypeVar("T")

MAX_STILL_SECONDS = 2.0  # A longer time without a frame is a gap.
# Unix times are rounded to less than a microsecond, and time stamps of MKV to a millisecond.
ROUNDING = 1e-3
LAST_SHARE = 0.4  # Share of its seconds that the last chunk of a file must have.


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame of Unix time `at`, whose pixels are made only if they are needed.

    size: width and height of the whole picture. truth: what it shows, if that is known.
    """

    at: float
    size: tuple[int, int]
    read: Callable[[View], Pixels]
    truth: str | None = None


@dataclass(frozen=True, eq=False)
class Chunk(Generic[T]):
    """Evenly spaced frames of some seconds, all of one size: for each, the result of `keep`.

    began, ended: Unix seconds of the first and the last frame.
    """

    began: float
    ended: float
    frames: list[T]
    truth: str | None = None


class Chunker(Generic[T]):
    """Takes the frames of a stream in their order, and returns chunks.

    A chunk starts every `period` seconds. Its frames are the first ones at or after evenly spaced
    times, so a chunk is complete with its last frame, before its seconds are over. A stream with
    few frames repeats them.

    keep: what to keep of the pixels of a frame, RGB [height, width, 3].
    broken: number of chunks that a gap in the stream, or another size of its pictures, has ended.
    """

    def __init__(
        self, seconds: float, frames: int, period: float, view: View, keep: Callable[[Pixels], T]
    ) -> None:
        self._seconds, self._count, self._period = seconds, frames, period
        self._view, self._keep = view, keep
        self._max_still = max(MAX_STILL_SECONDS, seconds / 2)
        self._start = -math.inf
        self._frames: list[T] = []
        self._first: Frame | None = None
        self._ended = -math.inf  # Unix time of the last frame that was kept.
        self._latest: Frame | None = None
        self._has_made = False
        self.broken = 0

    @property
    def wanted(self) -> float:
        """Unix time of the next frame that a chunk needs. Earlier frames need no decoding."""
        return self._start + len(self._frames) * self._seconds / self._count - ROUNDING

    def restart(self) -> None:
        """Forget the frames of an incomplete chunk. The next frame starts a chunk."""
        self.broken += bool(self._frames)
        self._start, self._latest, self._frames = -math.inf, None, []

    def take(self, frame: Frame) -> list[Chunk[T]]:
        """Return the chunks that this frame completes."""
        latest, done = self._latest, []
        if latest is not None and latest.size != frame.size:
            self.restart()
        if frame.at >= self._start + self._seconds - ROUNDING:
            if self._frames and latest and frame.at - latest.at <= self._max_still:
                done.append(self._filled(self._frames[-1]))
            self._move_to(frame.at)
        self._latest = frame
        if frame.at >= self.wanted:
            done += self._add(frame)
        return done

    def finish(self) -> list[Chunk[T]]:
        """Return the last chunk of a stream if it has about half of its seconds, or is the only
        one."""
        latest = self._latest
        if not self._frames or latest is None:
            return []
        if self._has_made and latest.at < self._start + LAST_SHARE * self._seconds:
            return []
        self._ended = latest.at
        return [self._filled(self._keep(latest.read(self._view)))]

    def _add(self, frame: Frame) -> list[Chunk[T]]:
        kept = self._keep(frame.read(self._view))
        if not self._frames:
            self._first = frame
        self._ended = frame.at
        while frame.at >= self.wanted and len(self._frames) < self._count:
            self._frames.append(kept)
        return [self._complete()] if len(self._frames) == self._count else []

    def _filled(self, last: T) -> Chunk[T]:
        self._frames += [last] * (self._count - len(self._frames))
        return self._complete()

    def _move_to(self, time: float) -> None:
        """Begin the chunk in whose seconds `time` lies, or the next one, in step with the last."""
        self.broken += bool(self._frames)
        self._frames = []
        if not math.isfinite(self._start):
            self._start = time
            return
        self._start += self._period * max(
            0, math.floor((time - self._start + ROUNDING) / self._period)
        )
        if time >= self._start + self._seconds - ROUNDING:
            self._start += self._period

    def _complete(self) -> Chunk[T]:
        assert self._first is not None
        chunk = Chunk(self._first.at, self._ended, self._frames, self._first.truth)
        self._start += self._period
        self._frames, self._has_made = [], True
        return chunk

"""A camera: a thread that reads its source, connects again when it is lost, and keeps one chunk."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TypeVar

from vlora.errors import InvalidArgument, pause_after
from vlora.watch.chunks import Chunk, Chunker
from vlora.watch.clock import unix_time
from vlora.watch.config import Camera
from vlora.watch.counts import Counts, StreamCounts
from vlora.watch.gate import small_grey
from vlora.watch.pixels import Pixels, Shot, View, encoded
from vlora.watch.ring import PacketRing
from vlora.watch.sources import (
    PICTURES,
    SYNTHETIC,
    FrameFolder,
    Source,
    SourceError,
    SyntheticCamera,
)

T = TypeVar("T")

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
STEADY_SECONDS = 10.0  # After a connection that lasted so long, the pauses start anew.
HOURS_CHECK_SECONDS = 5.0


class Mailbox:
    """The newest chunk that nobody has taken yet, of each `every`-th chunk of a stream.

    name: of the camera or question that takes the chunks. notify: called in the thread of the
    stream after each change.
    """

    def __init__(self, name: str, notify: Callable[[], None], every: int = 1) -> None:
        self.name, self.notify = name, notify
        self.counts = Counts()
        self.is_closed = False  # Nobody takes chunks any more.
        self._every, self._seen = every, 0
        self._changed = Condition()
        self._chunk: Chunk[Shot] | None = None

    def put(self, chunk: Chunk[Shot], stop: Event, must_wait: bool) -> None:
        """Keep a chunk. It replaces another, unless the caller must wait until that is taken."""
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        with self._changed:
            while must_wait and self._chunk and not (stop.is_set() or self.is_closed):
                self._changed.wait(0.2)
            self.counts.count_chunk(self._chunk is not None, time.monotonic())
            self._chunk = chunk
        self.notify()

    def take(self) -> Chunk[Shot] | None:
        with self._changed:
            chunk, self._chunk = self._chunk, None
            self._changed.notify_all()
        return chunk


class CameraReader:
    """Reads one camera in a thread of its own until it is stopped, or a file has ended.

    mailboxes: get its chunks. Whoever adds and removes them does so in one thread.
    state: "connecting", "running", "waiting" (for its hours or the next connection), "stopped".
    """

    def __init__(self, camera: Camera, report: Callable[[str], None]) -> None:
        self.camera = camera
        self.mailboxes: tuple[Mailbox, ...] = ()
        self.counts = StreamCounts()
        self.ring = PacketRing(camera.clip.seconds, camera.clip.megabytes * 2**20)
        self.view = View.of(camera.regions, camera.size)
        self.state, self.detail = "connecting", ""
        self._told = ""  # Reason that was reported since the last connection.
        self._report = report
        shape = (camera.seconds, camera.frames, camera.period, self.view)
        self._chunker = Chunker(*shape, self._shot)
        self._stop = Event()
        self._thread = Thread(target=self._run, name="camera", daemon=True)

    @property
    def name(self) -> str:
        return ", ".join(box.name for box in self.mailboxes)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. A read that waits for its camera ends with its time-out."""
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def has_ended(self) -> bool:
        return self.state == "stopped"

    def _shot(self, pixels: Pixels) -> Shot:
        # Encoded here, one by one as they come, since a chunk of pixels is twenty times larger.
        return Shot(encoded(pixels), small_grey(pixels) if self.camera.gate else None)

    def _run(self) -> None:
        failures, connections, is_repeated = 0, 0, False
        try:
            while not self._stop.is_set():
                if not self.camera.is_watched(datetime.now()):
                    self._be("waiting", "outside its hours")
                    self._stop.wait(HOURS_CHECK_SECONDS)
                    continue
                if not is_repeated:
                    self.counts.reconnections += connections > 0
                    connections += 1
                    self._be("connecting", "")
                began = time.monotonic()
                reason = self._read_once()
                is_repeated = reason == "" and self.camera.repeat and not self.camera.scheme
                if reason is None or is_repeated or self._stop.is_set():
                    continue
                if self._is_over(reason):
                    break
                if time.monotonic() - began > STEADY_SECONDS:
                    failures = 0
                failures += 1
                pause = pause_after(failures, MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
                # Cameras of a server that comes back do not all connect at once.
                self._wait(reason, pause * random.uniform(0.5, 1.0))
        finally:
            self._be("stopped", self.detail)

    def _is_over(self, reason: str) -> bool:
        """Return whether a finite source has ended and is not repeated."""
        is_finite = not self.camera.scheme and not self.camera.url.startswith("/dev/")
        return is_finite and not reason

    def _wait(self, reason: str, seconds: float) -> None:
        self.counts.gaps += 1
        reason = reason or "the stream has ended"
        if reason != self._told:  # A camera that is away for days is told once.
            self._report(f"{self.name}: {reason}; next connection in {seconds:.1f} s")
        self._told = reason
        self._be("waiting", reason)
        self._stop.wait(seconds)

    def _read_once(self) -> str | None:
        """Connect and read to the end. Return why it ended: "" for an orderly end, None for that of
        the camera's hours."""
        self._chunker.restart()
        source: Source | None = None
        try:
            source = open_source(self.camera, self.ring, self.counts)
            return "" if self._read(source) else None
        except (SourceError, InvalidArgument) as error:
            return str(error)
        except Exception as error:
            # A bug that one camera meets must not end it, nor the others. The error's own text is
            # not shown, because FFmpeg's errors have the URL with its password.
            place = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        finally:
            if source is not None:
                source.close()

    def _read(self, source: Source) -> bool:
        """Pass chunks on. Return whether the source has ended; otherwise its hours have."""
        is_empty = True
        for frame in source.frames(lambda: self._chunker.wanted):
            if self.camera.pace == "real":
                # A live frame is never ahead of its time.
                self._stop.wait(max(0.0, frame.at - unix_time()))
            if self.state != "running":
                self._report(f"{self.name}: connected to {self.camera.shown_url}")
                self._told = ""
                self._be("running", "")
            is_empty = False
            self._pass_on(self._chunker.take(frame))
            if self._stop.is_set() or not self.camera.is_watched(datetime.now()):
                return False
        if is_empty:
            raise SourceError(f"{self.camera.shown_url} has no frames")
        self._pass_on(self._chunker.finish())
        return True

    def _pass_on(self, chunks: list[Chunk[Shot]]) -> None:
        for chunk in chunks:
            self.counts.broken = self._chunker.broken
            for box in self.mailboxes:
                box.put(chunk, self._stop, must_wait=self.camera.pace == "fast")

    def _be(self, state: str, detail: str) -> None:
        self.state, self.detail = state, detail
        for box in self.mailboxes:
            box.notify()


def open_source(camera: Camera, ring: PacketRing, counts: StreamCounts) -> Source:
    """Return the open source of a camera. Raises SourceError, and InvalidArgument for a variable
    that is not set."""
    url = camera.full_url(os.environ)
    kind, _, seed = url.partition(":")
    if kind == SYNTHETIC:
        return SyntheticCamera(camera.fps, int(seed or 0))
    if not camera.scheme and Path(url).is_dir():
        return FrameFolder(Path(url), camera.fps)
    if not camera.scheme and Path(url).suffix.lower() in PICTURES:
        raise SourceError(f"{url} is a picture; name a video, or a folder of pictures")
    # Imported here because PyAV belongs to the extra `watch`, and these sources do not need it.
    from vlora.watch.streams import VideoStream

    return VideoStream(camera, url, ring, counts)


def read_chunks(camera: Camera, keep: Callable[[Pixels], T]) -> Iterator[Chunk[T]]:
    """Yield the chunks of a source as fast as they are taken, with what `keep` makes of the pixels
    of their frames. Raises SourceError."""
    view = View.of(camera.regions, camera.size)
    chunker = Chunker(camera.seconds, camera.frames, camera.period, view, keep)
    source = open_source(camera, PacketRing(0.0, 0.0), StreamCounts())
    try:
        for frame in source.frames(lambda: chunker.wanted):
            yield from chunker.take(frame)
        yield from chunker.finish()
    finally:
        source.close()

"""The run of `vlora watch`: all cameras of a file, their requests, and changes of the file."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlora.errors import Cancelled, InvalidArgument, VLoraError
from vlora.watch.admission import Admission
from vlora.watch.answers import Answer, CameraView
from vlora.watch.asking import Analytics, NoServer, answer_of, is_full
from vlora.watch.camera import CameraReader, Mailbox
from vlora.watch.chunks import Chunk
from vlora.watch.clock import unix_time
from vlora.watch.config import Camera, Cameras, read_cameras
from vlora.watch.counts import Counts
from vlora.watch.desk import AlertDesk
from vlora.watch.gate import SceneGate
from vlora.watch.pixels import Shot

# Interval of looking whether the file has changed. One that changed since the last look may be
# written in part, so it is read at the next.
RELOAD_SECONDS = 1.0
RETRY_SECONDS = 1.0  # Pause before a chunk that may not be dropped is sent again.
DRAIN_SECONDS = 5.0  # Time at the end for answers in flight.

Report = Callable[[str], None]


@dataclass(eq=False)
class Watched:
    """A camera of the run, or one of its questions: its reader, which others may share, and what is
    known from its answers."""

    camera: Camera
    reader: CameraReader
    mailbox: Mailbox
    stream_id: str
    gate: SceneGate | None
    changed: asyncio.Event
    last: Answer | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return self.mailbox.name

    @property
    def counts(self) -> Counts:
        return self.mailbox.counts

    def end(self) -> None:
        """Take no more chunks, and stop the reader if nobody else does."""
        self.mailbox.is_closed = True
        reader = self.reader
        if others := tuple(box for box in reader.mailboxes if box is not self.mailbox):
            reader.mailboxes = others
        else:
            reader.stop()
        self.changed.set()

    @property
    def is_overloaded(self) -> bool:
        return self.reader.state == "running" and self.counts.is_overloaded

    def view(self) -> CameraView:
        """Return what the page shows."""
        counts, stream, last = self.counts, self.reader.counts, self.last
        return CameraView(
            name=self.name,
            state=self.reader.state,
            overloaded=self.is_overloaded,
            detail=self.reader.detail or self.error,
            adapter=self.camera.adapter or "",
            picture=last.picture if last else b"",
            answer=last.text if last else "",
            answered=last.answered if last else None,
            lag=counts.lags[-1] if counts.lags else None,
            chunks=counts.chunks,
            drops=counts.drops,
            reconnections=stream.reconnections,
            gaps=stream.gaps,
            damaged=stream.damaged,
            errors=counts.errors,
            skipped=counts.share_skipped,
        )


class Watch:
    """All cameras. Its methods are called in the thread of its loop, unless they say otherwise.

    path: file whose changes take effect, or None.
    report: takes a sentence about each event of a camera, from any thread.
    record: takes a dictionary about each answer, which JSON can represent.
    """

    def __init__(
        self,
        path: Path | None,
        cameras: Cameras,
        analytics: Analytics,
        desk: AlertDesk,
        report: Report,
        record: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:
        self._path, self._file = path, cameras
        self._known = None if path is None else _stamp(path)
        self._analytics, self._desk, self._report, self._record = analytics, desk, report, record
        self._run = uuid.uuid4().hex[:12]
        self._admission = Admission()
        self._watched: dict[str, Watched] = {}
        self._tasks: dict[Watched, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Watch until all sources have ended. Cancelling it is the orderly end."""
        self._apply(self._file)
        reload = asyncio.create_task(self._reload(self._path)) if self._path else None
        try:
            while self._tasks:
                await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
                for watched in [one for one, task in self._tasks.items() if task.done()]:
                    self._tasks.pop(watched).result()
        finally:
            if reload is not None:
                reload.cancel()
            await self._end()

    def views(self) -> Sequence[CameraView]:
        """Return what the page shows of each camera. Any thread may call it."""
        return [watched.view() for watched in list(self._watched.values())]

    def watched(self) -> Sequence[Watched]:
        return list(self._watched.values())

    def _apply(self, file: Cameras) -> None:
        """Start, change and stop cameras. A stream whose keys are the same keeps its connection."""
        ended, new_readers = [], []
        for name in [*self._watched]:
            new, watched = file.cameras.get(name), self._watched[name]
            if new is not None and _is_same(new, watched.camera):
                watched.camera = new
                continue
            ended.append(self._watched.pop(name))
            self._admission.forget(name)
            if new is None:
                self._desk.forget(name)
                self._report(f"{name}: is no longer watched")
        readers = [watched.reader for watched in [*ended, *self._watched.values()]]
        streams = {one.camera.stream: one for one in readers if not one.has_ended}
        for name, camera in file.cameras.items():
            if name not in self._watched:
                reader = streams.get(camera.stream)
                if reader is None:
                    reader = streams[camera.stream] = CameraReader(camera, self._report)
                    new_readers.append(reader)
                self._add(name, camera, reader)
        for reader in new_readers:
            reader.start()
        for watched in ended:
            watched.end()
        for sentence in file.doubled():
            self._report(sentence)
        self._file = file

    def _add(self, name: str, camera: Camera, reader: CameraReader) -> None:
        changed = asyncio.Event()
        changed.set()  # The reader may have a state already.

        def notify() -> None:
            with suppress(RuntimeError):  # The loop is closed if a thread ends late.
                self._loop.call_soon_threadsafe(changed.set)

        mailbox = Mailbox(name, notify, camera.every)
        reader.mailboxes = (*reader.mailboxes, mailbox)
        gate = None
        if camera.gate is not None:
            gate = SceneGate(camera.gate, camera.regions, reader.view)
        watched = Watched(camera, reader, mailbox, f"{self._run}-{name}", gate, changed)
        self._watched[name] = watched
        self._tasks[watched] = asyncio.create_task(self._serve(watched))

    async def _reload(self, path: Path) -> None:
        stamp = self._known
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            last, stamp = stamp, _stamp(path)
            if stamp == self._known or stamp != last:
                continue
            self._known = stamp
            try:
                file = await asyncio.to_thread(read_cameras, path)
            except InvalidArgument as error:
                self._report(f"the changed file is not used: {error}")
                continue
            if _without_cameras(file) != _without_cameras(self._file):
                self._report("server, sinks, retention and page change with the next start only")
            self._apply(file)
            self._report(f"{path} was read again: {len(file.cameras)} cameras")

    async def _serve(self, watched: Watched) -> None:
        """Ask about the chunks of a camera, one at a time, until it has ended."""
        state = ("", "")
        while True:
            await watched.changed.wait()
            watched.changed.clear()
            reader, mailbox, old = watched.reader, watched.mailbox, state
            state, has_ended = (reader.state, reader.detail), reader.has_ended
            if state != old and self._watched.get(watched.name) is watched:
                self._desk.tell(watched.name, *state)
            while not mailbox.is_closed and (chunk := mailbox.take()) is not None:
                await self._handle(watched, chunk)
            if has_ended or mailbox.is_closed:
                return

    async def _handle(self, watched: Watched, chunk: Chunk[Shot]) -> None:
        counts, name = watched.counts, watched.name
        if self._admission.is_yielding(name, time.monotonic()):
            counts.drops += 1
            counts.yielded += 1
            return
        if watched.last and watched.gate and not watched.gate.has_changed(chunk, unix_time()):
            self._skip(watched, watched.last, chunk)
            return
        # The times of a file that is read fast lie in the future.
        asked = unix_time()
        since = chunk.ended if watched.camera.pace == "real" else asked
        result = await self._ask(watched, chunk)
        if result is None or self._watched.get(name) is not watched:
            return
        answer = answer_of(name, chunk, result, watched.reader.ring.clip)
        watched.last, watched.error = answer, ""
        counts.answered += 1
        counts.lags.append(answer.answered - since)
        if watched.gate:
            watched.gate.note_answer(chunk, answer.answered)
        self._desk.take(watched.camera.alerts, answer)
        self._tell(answer, chunk, asked, result)

    def _skip(self, watched: Watched, last: Answer, chunk: Chunk[Shot]) -> None:
        """Let the last answer stand for an unchanged chunk."""
        watched.counts.skipped += 1
        again = replace(last, began=chunk.began, ended=chunk.ended, answered=unix_time())
        self._desk.take(watched.camera.alerts, again)

    async def _ask(self, watched: Watched, chunk: Chunk[Shot]) -> dict[str, Any] | None:
        """Return the result of the server, or None if the chunk is given up."""
        files = [shot.file for shot in chunk.frames]
        while True:
            try:
                return await self._analytics.ask(watched.camera, watched.stream_id, files)
            except (VLoraError, NoServer) as error:
                is_away = isinstance(error, NoServer) or is_full(error)
                self._note_error(watched, error)
                if watched.camera.pace == "real" or not is_away or watched.mailbox.is_closed:
                    return None
            await asyncio.sleep(RETRY_SECONDS)

    def _note_error(self, watched: Watched, error: VLoraError | NoServer) -> None:
        counts, name = watched.counts, watched.name
        if isinstance(error, Cancelled) or is_full(error):
            counts.drops += 1
        else:
            counts.errors += 1
        if isinstance(error, NoServer):
            # All cameras meet it, so it is told once.
            if not any(one.error == str(error) for one in self._watched.values()):
                self._report(str(error))
        elif str(error) != watched.error and not isinstance(error, Cancelled):
            self._report(f"{name}: {error}")
        watched.error = str(error)
        if is_full(error):
            running = [one for one in self._watched.items() if one[1].reader.state == "running"]
            priorities = {one: watched.camera.priority for one, watched in running}
            if yields := self._admission.refused(priorities, time.monotonic()):
                self._report(f"{yields}: yields to other cameras, because the server is full")

    def _tell(
        self, answer: Answer, chunk: Chunk[Shot], asked: float, result: dict[str, Any]
    ) -> None:
        record = {
            "camera": answer.camera,
            "began": answer.began,
            "ended": answer.ended,
            "asked": asked,
            "answered": answer.answered,
            "result": result,
        }
        self._record(record | ({} if chunk.truth is None else {"truth": chunk.truth}))

    async def _end(self) -> None:
        """Stop all cameras, and wait a little for answers in flight."""
        for watched in self._watched.values():
            watched.end()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=DRAIN_SECONDS)
        for task in self._tasks.values():
            task.cancel()


def _is_same(new: Camera, old: Camera) -> bool:
    """Return whether a camera is asked about as before. The rules of its alerts may differ."""
    return new.model_copy(update={"alerts": ()}) == old.model_copy(update={"alerts": ()})


def _without_cameras(file: Cameras) -> Cameras:
    return file.model_copy(update={"cameras": {}, "defaults": {}})


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # Editors replace files. The old one stays in effect until there is a new one.
    return found.st_mtime_ns, found.st_size, found.st_ino

"""The desk of the alerts: decides on events, stores them, and hands them to the sinks."""

from __future__ import annotations

import base64
import io
import json
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from PIL import Image, ImageDraw

from vlora.watch.answers import Answer
from vlora.watch.clock import unix_time
from vlora.watch.disk_queue import SUFFIX, count_messages
from vlora.watch.events import Event
from vlora.watch.rules import AlertRule, AlertState
from vlora.watch.sinks import Delivery, SinkOptions
from vlora.watch.store import Retention, Store, file_name

MAX_WAITING = 500  # Maximum number of events that wait for the disk.
MAX_NEWEST = 100  # Events that the page shows.
TICK_SECONDS = 1.0  # Interval of looking for silent cameras.
TRIM_SECONDS = 600.0
OPEN_SECONDS = 5.0  # Interval of saving how long the events have lasted.
QUEUES = "queues"  # Folder of the sinks' queues.
CLOSE_SHARE = 0.5  # Share of the time for closing that the events which wait may take.
MAX_BOXES = 100
BOX_COLOUR = (29, 95, 224)  # The playground's.


def open_desk(sinks: Sequence[SinkOptions], retention: Retention) -> AlertDesk:
    """Return a desk with these sinks. Raises ServerError if a sink or the folder cannot be used."""
    store = Store(retention)
    store.lock()  # Before the events of a killed process are ended: it may live.
    opened: list[Delivery] = []
    try:
        for options in sinks:
            opened.append(Delivery(options, retention.folder / QUEUES))
    except BaseException:
        for delivery in opened:
            delivery.close(1.0)
        store.unlock()
        raise
    return AlertDesk(opened, store)


def removed_sinks(
    sinks: Sequence[SinkOptions], retention: Retention, clean: bool = False
) -> Iterator[str]:
    """Yield a sentence for each queue of a sink that is not in the file any more.

    clean: remove queues that are empty, or that nobody has touched for the days of `retention`.
    """
    names = {options.name for options in sinks}
    for path in sorted((retention.folder / QUEUES).glob(f"*{SUFFIX}")):
        if (name := path.name.removesuffix(SUFFIX)) in names:
            continue
        parts = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
        age = time.time() - max(part.stat().st_mtime for part in parts if part.exists())
        count = count_messages(path)
        told = f"the sink '{name}' is not in the file, but {path} holds {count} of its messages"
        if count is None:
            yield f"the sink '{name}' is not in the file, and its queue {path} cannot be read"
            continue
        if not clean or (count and age < retention.days * 86400):
            yield f"{told}; name the sink again to send them, or remove the queue"
            continue
        for part in parts:
            part.unlink(missing_ok=True)
        if count:
            yield f"{told}, older than {retention.days:g} days; the queue was removed"


class AlertDesk:
    """The alerts of all cameras. Its methods return at once, and any thread may call them."""

    def __init__(self, sinks: Sequence[Delivery], store: Store) -> None:
        """Take over the sinks and the locked store, which `close` closes and unlocks."""
        self.store = store
        self._sinks = sinks
        self._states: dict[str, dict[str, AlertState]] = {}  # by camera, by rule
        self._camera_states: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()  # of the two above and of the counts
        self._events: queue.Queue[Event | None] = queue.Queue(MAX_WAITING)
        self._begun: Counter[str] = Counter()
        self._lost = self._timeouts = self._media_errors = 0
        self._newest = deque(reversed(store.newest(MAX_NEWEST)), MAX_NEWEST)  # the oldest first
        self._open: dict[str, dict[str, Any]] = {}  # Records of events that last, by id.
        self._end_those_of_a_killed_process()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_events, name="alerts", daemon=True)
        self._thread.start()

    def take(self, rules: Sequence[AlertRule], answer: Answer) -> None:
        """Apply the rules of a camera to its next answer. An event of a rule that was changed or
        removed ends."""
        with self._lock:
            known = self._states.setdefault(answer.camera, {})
            for name in [name for name, state in known.items() if state.rule not in rules]:
                self._pass_on(known.pop(name).finish("changed"))
            for rule in rules:
                state = known.setdefault(rule.name, AlertState(rule, answer.camera))
                try:
                    self._pass_on(state.take(answer))
                except TimeoutError:
                    self._timeouts += 1

    def tell(self, camera: str, state: str, detail: str = "") -> None:
        """Show the state of a camera (see CameraView) to the sinks."""
        with self._lock:
            self._camera_states[camera] = (state, detail)
            self._tell(camera)

    def forget(self, camera: str) -> None:
        """End the events of a camera that was removed."""
        with self._lock:
            for state in self._states.pop(camera, {}).values():
                self._pass_on(state.finish("changed"))
            self._camera_states.pop(camera, None)
            for sink in self._sinks:
                sink.tell(camera, b"")

    def newest(self) -> list[dict[str, Any]]:
        """Return the records of the last events, the newest first."""
        return list(reversed(self._newest.copy()))

    def counts(self) -> dict[str, Any]:
        """Return totals since the start.

        events: by camera. lost: events that the disk was too slow for. timeouts: answers on which
        a regular expression took too long. media_errors: pictures and clips that could not be made.
        store_errors: files that could not be written. sinks: see `Delivery.counts`, by name.
        """
        with self._lock:
            return {
                "events": dict(self._begun),
                "lost": self._lost,
                "timeouts": self._timeouts,
                "media_errors": self._media_errors,
                "store_errors": self.store.errors,
                "sinks": {sink.name: sink.counts() for sink in self._sinks},
            }

    def close(self, timeout: float) -> None:
        """End all events, and hand them to the sinks within `timeout` seconds. What they have not
        taken then waits on disk for the next start."""
        deadline = time.monotonic() + timeout
        with self._lock:
            for camera, states in self._states.items():
                for state in states.values():
                    self._pass_on(state.finish("stopped"))
                self._camera_states[camera] = ("stopped", "")
                self._tell(camera)
        self._closing.set()
        with suppress(queue.Full):  # Otherwise the thread is not waiting for an event.
            self._events.put_nowait(None)
        self._thread.join(timeout * CLOSE_SHARE)
        for sink in self._sinks:
            sink.stop()
        for sink in self._sinks:
            sink.close(max(0.0, deadline - time.monotonic()))
        self.store.unlock()

    def _pass_on(self, events: Sequence[Event]) -> None:
        for event in events:
            self._begun[event.camera] += event.end is None
            try:
                self._events.put_nowait(event)
            except queue.Full:
                self._lost += 1
            self._tell(event.camera)

    def _tell(self, camera: str) -> None:
        state, detail = self._camera_states.get(camera, ("running", ""))
        rules = [name for name, one in self._states.get(camera, {}).items() if one.event]
        text = json.dumps({"camera": camera, "state": state, "detail": detail, "alerts": rules})
        for sink in self._sinks:
            sink.tell(camera, text.encode())

    def _write_events(self) -> None:
        next_trim = time.monotonic() + TRIM_SECONDS
        next_open = time.monotonic() + OPEN_SECONDS
        while True:
            try:
                event = self._events.get(timeout=TICK_SECONDS)
            except queue.Empty:
                event = None
            if event is not None:
                self._write(event)
            elif self._closing.is_set():
                return
            self._expire()
            if time.monotonic() >= next_trim:
                self.store.trim()
                next_trim += TRIM_SECONDS
            if time.monotonic() >= next_open:
                if self._open:
                    self.store.save_open([*self._open.values()])
                next_open += OPEN_SECONDS

    def _expire(self) -> None:
        with self._lock:
            for states in self._states.values():
                for state in states.values():
                    self._pass_on(state.expire(unix_time()))
                    if state.event and (record := self._open.get(state.event.id)):
                        record["end"] = state.last_hit

    def _end_those_of_a_killed_process(self) -> None:
        for record in self.store.left_open():
            record |= {"kind": "end", "reason": "killed"}
            self._send(record, None)
        self.store.save_open([])

    def _write(self, event: Event) -> None:
        answer, picture = event.answer, None
        if event.end is None:
            picture = self._try_to(lambda: draw_boxes(answer.picture, answer.objects))
            self._save(event, "jpg", picture)
        end = answer.ended if event.end is None else event.end
        self._save(event, "mp4", self._try_to(lambda: answer.clip(event.begin, end)))
        record = event.as_json() | self.store.media_of(event)
        if event.end is None:
            # Before it is sent, so that each begin which a receiver gets is followed by an end.
            self._open[event.id] = record | {"end": answer.ended}
            self.store.save_open([*self._open.values()])
        self._send(record, picture)
        if event.end is not None and event.id in self._open:
            del self._open[event.id]
            self.store.save_open([*self._open.values()])

    def _send(self, record: dict[str, Any], picture: bytes | None) -> None:
        message = json.dumps(record).encode()
        self.store.save(f"{record['id']}.json", message)
        self._remember(record)
        for sink in self._sinks:
            if sink.picture and picture:
                inline = {**record, "picture_base64": base64.b64encode(picture).decode()}
                sink.put(json.dumps(inline).encode())
            else:
                sink.put(message)

    def _remember(self, record: dict[str, Any]) -> None:
        for index, known in enumerate(self._newest):
            if known["id"] == record["id"]:
                self._newest[index] = record
                return
        self._newest.append(record)

    def _save(self, event: Event, kind: str, content: bytes | None) -> None:
        if content:
            self.store.save(file_name(event, kind), content)

    def _try_to(self, make: Callable[[], bytes | None]) -> bytes | None:
        try:
            return make()
        except Exception:
            # The packets of a camera and the boxes of an answer may be wrong in any way. The event
            # goes without them.
            self._media_errors += 1
            return None


def draw_boxes(picture: bytes, objects: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a JPEG with the boxes of `objects` and their labels drawn; without any, as it is."""
    if not objects or not picture:
        return picture
    with Image.open(io.BytesIO(picture)) as opened:
        image = opened.convert("RGB")
    draw = ImageDraw.Draw(image)
    side = max(image.size)
    width, size = max(2, side // 200), max(11, side // 40)
    for one in objects[:MAX_BOXES]:
        left, top, right, bottom = one["box"]
        # Boxes may be outside of the picture, or have their sides swapped.
        across = sorted(min(max(x, 0), image.width - 1) for x in (left, right))
        down = sorted(min(max(y, 0), image.height - 1) for y in (top, bottom))
        draw.rectangle((across[0], down[0], across[1], down[1]), outline=BOX_COLOUR, width=width)
        if label := str(one.get("label") or "")[:40]:
            corner = (across[0] + width, down[0] + width)
            draw.rectangle(draw.textbbox(corner, label, font_size=size), fill=BOX_COLOUR)
            draw.text(corner, label, fill="white", font_size=size)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()

"""Receivers of events: a file of JSON lines, a webhook, and an MQTT broker.

Each has a queue on disk and a thread of its own, so that one that is slow or away delays neither
the cameras nor another. A message is sent again until its receiver has taken it, so it may arrive
twice; `id` and `kind` tell repeats.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

from pydantic import Field, field_validator

from vlora.errors import ServerError, pause_after
from vlora.net import is_local
from vlora.strict_yaml import Int, StrictModel, fill_variables
from vlora.watch.disk_queue import SUFFIX, DiskQueue

# Pauses in seconds after a failed try: the first one, doubled each time up to the last one.
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0
ANSWER_SECONDS = 10.0  # Time limit for each step of sending a message.
MAX_ANSWER_BYTES = 64 * 1024
# Answers of a webhook that say that this message is wrong. It is dropped, since it would fail again
# and hold up all others.
REFUSALS = {400, 413, 415, 422}

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SinkAway(Exception):
    """Raised if a receiver has not taken a message. The text tells no secrets."""


class SinkRefused(Exception):
    """Raised if a receiver will never take this message."""


class Sink(ABC):
    """A receiver of messages. All calls but `tell` come from one thread.

    problem: why there is no connection, if the sink keeps one; otherwise "".
    """

    problem = ""

    def start(self) -> None:  # noqa: B027 - few sinks keep a connection
        """Begin to connect, once, before all other calls."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Return when the receiver has taken the message. Raises SinkAway and SinkRefused."""

    def tell(self, camera: str, state: bytes) -> None:  # noqa: B027 - few sinks show states
        """Show the present state of a camera, if the sink can; empty if the camera was removed.
        Returns at once."""

    def close(self) -> None:  # noqa: B027 - few sinks hold anything
        """Close connections."""


class _Options(StrictModel):
    """Options of all sinks. picture: add the picture, in base64, to the message of a begin.

    max_messages, max_megabytes: bounds of the queue; beyond, the oldest messages are dropped.
    """

    name: Name
    picture: bool = False
    max_messages: Annotated[Int, Field(gt=0)] = 20_000
    max_megabytes: Annotated[Int, Field(gt=0)] = 500


class JsonLinesOptions(_Options):
    """path: file to which lines are appended; "-" is the standard output."""

    kind: Literal["jsonl"]
    path: Path = Path("-")

    def open(self) -> Sink:
        return JsonLines(self.path)


class WebhookOptions(_Options):
    """url: http or https address that takes POST; `${NAME}` stands for an environment variable.

    secret_env: environment variable with the value of the header `header`.
    """

    kind: Literal["webhook"]
    url: str
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] = "Authorization"
    secret_env: Variable | None = None

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")) or "@" in urlsplit(url).netloc:
            raise ValueError("must be http://… or https://…; a password belongs in secret_env")
        return url

    def open(self) -> Sink:
        url = fill_variables(self.url, _secret)
        secret = None if self.secret_env is None else _secret(self.secret_env)
        return Webhook(url, {} if secret is None else {self.header: secret})


class MqttOptions(_Options):
    """Topics are `TOPIC/CAMERA/event`, `TOPIC/CAMERA/state` and, for the last will, `TOPIC/watch`.

    password_env: environment variable with the password of `username`. ca: PEM file of the
      authority for `tls`, if it is not one of the system's.
    """

    kind: Literal["mqtt"]
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[Int, Field(gt=0, lt=65536)] = 1883
    tls: bool = False
    ca: Path | None = None
    username: str | None = None
    password_env: Variable | None = None
    topic: Annotated[str, Field(pattern=r"^[\w-]+(/[\w-]+)*$")] = "vlora"
    keepalive_seconds: Annotated[Int, Field(ge=5, le=3600)] = 30

    def open(self) -> Sink:
        if importlib.util.find_spec("paho") is None:
            raise ServerError("the sink mqtt needs paho-mqtt: pip install 'vlora[watch]'")
        return Mqtt(self)


SinkOptions = Annotated[
    JsonLinesOptions | WebhookOptions | MqttOptions, Field(discriminator="kind")
]


def _secret(variable: str) -> str:
    if not (value := os.environ.get(variable)):
        raise ServerError(f"the environment has no variable {variable}, which a sink names")
    if not value.isprintable():
        raise ServerError(f"the variable {variable} must be one line of printable characters")
    return value


class Delivery:
    """A sink with its queue and its thread."""

    def __init__(
        self, options: JsonLinesOptions | WebhookOptions | MqttOptions, folder: Path
    ) -> None:
        """Open sink and queue. Raises ServerError."""
        self.name, self.picture = options.name, options.picture
        self._sent = self._refused = self._failures = 0
        self._away = ""
        size = options.max_megabytes * 1_000_000
        self._queue = DiskQueue(folder / f"{options.name}{SUFFIX}", options.max_messages, size)
        self._sink = options.open()
        self._sink.start()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {self.name}", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        self._queue.put(message)
        self._wake.set()

    def tell(self, camera: str, state: bytes) -> None:
        self._sink.tell(camera, state)

    def counts(self) -> dict[str, Any]:
        """Return the totals since the start, what waits, and why the receiver is away, or ""."""
        return {
            "sent": self._sent,
            "queued": len(self._queue),
            "queued_bytes": self._queue.size_bytes,
            "dropped": self._queue.dropped,
            "refused": self._refused,
            "failures": self._failures,
            "away": self._away or self._sink.problem,
        }

    def stop(self) -> None:
        """Begin to end: send what waits, unless the receiver is away."""
        self._closing.set()
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Stop, wait so many seconds for the thread, and close. What was not sent stays on disk."""
        self.stop()
        self._thread.join(seconds)
        self._sink.close()
        self._queue.close()

    def _run(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            sent = self._send_first()
            if sent is True:
                failures = 0
            elif self._closing.is_set():
                return
            elif sent is None:
                self._wake.wait()
            else:
                failures += 1
                pause = pause_after(failures, FIRST_PAUSE, LAST_PAUSE)
                self._closing.wait(pause * random.uniform(0.8, 1.2))

    def _send_first(self) -> bool | None:
        """Return whether the oldest message is done; None if there is none."""
        try:
            if (first := self._queue.first()) is None:
                return None
            number, message = first
            try:
                self._sink.send(message)
                self._sent += 1
            except SinkRefused as error:
                self._refused += 1
                self._away = str(error)
            else:
                self._away = ""
            self._queue.remove(number)
            return True
        except SinkAway as error:
            self._away = str(error)
        except Exception as error:
            # Whatever fails in a library or the disk must not end the thread; it is tried again.
            self._away = type(error).__name__
        self._failures += 1
        return False


class JsonLines(Sink):
    """A file to which each event is appended as a line, or the standard output."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, message: bytes) -> None:
        line = message + b"\n"
        try:
            if str(self._path) == "-":
                # Not by `sys.stdout`, whose lock a thread that waits here would hold for ever.
                while line:
                    line = line[os.write(1, line) :]
                return
            # The file is opened each time, so that it may be renamed or removed meanwhile.
            with self._path.open("ab", buffering=0) as file:
                start = file.tell()
                if file.write(line) != len(line):
                    file.truncate(start)
                    raise SinkAway(f"{self._path} is full")
        except OSError as error:
            raise SinkAway(f"cannot write {self._path}: {error.strerror}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another address must not get the secret, nor a GET in place of the event."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _TimedAnswer(HTTPResponse):
    """An answer that is cut off after ANSWER_SECONDS, even if one byte of it comes now and then."""

    def __init__(self, connection: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(connection, *arguments, **options)

        def cut_off() -> None:
            with suppress(OSError):  # It has been closed meanwhile.
                connection.shutdown(socket.SHUT_RDWR)

        self._timer = threading.Timer(ANSWER_SECONDS, cut_off)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        self._timer.cancel()
        super().close()


class _TimedAnswers(urllib.request.AbstractHTTPHandler):
    """Lets connections receive their answers within a time limit."""

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> HTTPResponse:
        def connect(*arguments: Any, **options: Any) -> Any:
            connection = http_class(*arguments, **options)
            connection.response_class = _TimedAnswer
            return connection

        return super().do_open(connect, req, **options)


class _Http(_TimedAnswers, urllib.request.HTTPHandler):
    pass


class _Https(_TimedAnswers, urllib.request.HTTPSHandler):
    pass


class Webhook(Sink):
    """An HTTP server to which each event is posted. 2xx answers take it, whatever their body."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json", "User-Agent": "vlora-watch", **headers}
        handlers: list[Any] = [_NoRedirects(), _Http(), _Https()]
        if is_local(urlsplit(url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def send(self, message: bytes) -> None:
        request = urllib.request.Request(self._url, message, self._headers, method="POST")
        try:
            answer = self._opener.open(request, timeout=ANSWER_SECONDS)
            with answer, suppress(OSError, HTTPException):
                answer.read(MAX_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            kind = SinkRefused if error.code in REFUSALS else SinkAway
            raise kind(f"the webhook answered {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:
            # Its own text may contain the address, in which there may be a secret.
            reason = getattr(error, "reason", error)
            known = reason.strerror if isinstance(reason, OSError) else None
            raise SinkAway(f"no answer of the webhook: {known or type(reason).__name__}") from None


class Mqtt(Sink):
    """An MQTT broker. Events have QoS 1; states have QoS 0 and are retained.

    `TOPIC/watch` is "online", and "offline" by the last will once the connection is lost. The
    states of the cameras are valid only while it is "online".
    """

    def __init__(self, options: MqttOptions) -> None:
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        self._topic = options.topic
        self._states: dict[str, bytes] = {}
        self.problem = "not connected yet"
        self._lock = threading.Lock()
        # The message that was given to the client, which sends it again after a reconnection.
        self._pending: tuple[bytes, Any] | None = None
        self._client = client = Client(CallbackAPIVersion.VERSION2)
        if options.username is not None:
            password = None if options.password_env is None else _secret(options.password_env)
            client.username_pw_set(options.username, password)
        if options.tls:
            client.tls_set(None if options.ca is None else str(options.ca))
        client.will_set(f"{self._topic}/watch", b"offline", qos=1, retain=True)
        client.reconnect_delay_set(1, int(LAST_PAUSE))
        client.on_connect = self._connected
        client.on_connect_fail = self._failed
        client.on_disconnect = self._disconnected
        self._broker = (options.host, options.port, options.keepalive_seconds)

    def start(self) -> None:
        self._client.connect_async(*self._broker)
        self._client.loop_start()

    def send(self, message: bytes) -> None:
        if self._pending is None or self._pending[0] != message:
            if not self._client.is_connected():
                raise SinkAway(self.problem)
            topic = f"{self._camera_topic(json.loads(message)['camera'])}/event"
            self._pending = (message, self._client.publish(topic, message, qos=1))
        try:
            self._pending[1].wait_for_publish(ANSWER_SECONDS)
            is_published = self._pending[1].is_published()
        except RuntimeError as error:  # The connection was lost before the client took it.
            self._pending = None
            raise SinkAway("no connection to the broker") from error
        if not is_published:
            raise SinkAway(self.problem or "the broker does not confirm the message")
        self._pending = None

    def tell(self, camera: str, state: bytes) -> None:
        with self._lock:
            if self._states.get(camera) == state:
                return
            self._states[camera] = state
            if self._client.is_connected():
                self._publish_state(camera, state)
            if not state:
                del self._states[camera]

    def close(self) -> None:
        """Say that watching has ended, and disconnect."""
        if self._client.is_connected():
            last = self._client.publish(f"{self._topic}/watch", b"offline", qos=1, retain=True)
            last.wait_for_publish(1.0)
        self._client.disconnect()
        self._client.loop_stop()

    def _connected(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.is_failure:
            self.problem = f"the broker refuses the connection: {reason}"
            return
        self.problem = ""
        client.publish(f"{self._topic}/watch", b"online", qos=1, retain=True)
        with self._lock:
            for camera, state in self._states.items():
                self._publish_state(camera, state)

    def _failed(self, client: Any, data: Any) -> None:
        self.problem = "no connection to the broker"

    def _disconnected(
        self, client: Any, data: Any, flags: Any, reason: Any, properties: Any
    ) -> None:
        self.problem = self.problem or f"the connection to the broker has ended: {reason}"

    def _publish_state(self, camera: str, state: bytes) -> None:
        # Without a confirmation, for which the client would keep all earlier states. What is lost
        # with a connection is told again on the next one.
        self._client.publish(f"{self._camera_topic(camera)}/state", state, retain=True)

    def _camera_topic(self, camera: str) -> str:
        # A name must not add levels or wildcards. Other characters are kept readable.
        parts = (c if c.isprintable() and c not in "%/+#$" else quote(c, safe="") for c in camera)
        return f"{self._topic}/{''.join(parts)}"

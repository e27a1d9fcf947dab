"""The page of `vlora watch`: cameras, their last answers, and events, for a browser.

It runs in a thread of its own, reads snapshots, and never makes a camera wait.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from vlora.errors import ServerError
from vlora.http_connection import LimitedConnection, server_config
from vlora.net import choose_ports, is_local, reachable_host
from vlora.static_pages import HEADERS, StaticPages
from vlora.strict_yaml import StrictModel
from vlora.watch.answers import CameraView
from vlora.watch.desk import AlertDesk

PAGE = Path(__file__).parent / "static"
# Files that the playground has too.
SHARED = {
    name: Path(__file__).parents[1] / "gateway" / "static" / name
    for name in ("dom.js", "icon.svg", "style.css")
}
SNAPSHOT_SECONDS = 0.5  # All viewers see the same snapshot for so long.
KEEP_ALIVE_SECONDS = 15
WRONG_PASSWORD_SECONDS = 1.0  # Pause after a wrong password, against guessing.
START_SECONDS = 10.0
MAX_TEXT = 4000  # Maximum number of characters of an answer that the page shows.
NO_STORE = {**HEADERS, "cache-control": "no-store"}

Cameras = Callable[[], Sequence[CameraView]]


class PageOptions(StrictModel):
    """listen: IP address and port of the page; port 0 chooses a free one.

    password_env: environment variable with the password, for any user name. It is required unless
      `listen` is a loopback address.
    """

    listen: str = "127.0.0.1:8090"
    password_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] = "VLORA_WATCH_PASSWORD"

    def address(self) -> tuple[str, int, str]:
        """Return IP address, port and password ("" if there is none). Raises ServerError."""
        host, _, port = self.listen.rpartition(":")
        host, password = host.strip("[]"), os.environ.get(self.password_env, "")
        try:
            is_loopback, number = ipaddress.ip_address(host).is_loopback, int(port)
        except ValueError:
            reason = f"the page listens at IP:PORT, as in 127.0.0.1:8090, not {self.listen!r}"
            raise ServerError(reason) from None
        if not is_loopback and not password:
            reason = f"the page at {self.listen} is open to a network, which needs a password"
            raise ServerError(f"{reason}; set the environment variable {self.password_env}")
        return host, number, password


class _Connection(LimitedConnection):
    """Viewers must not take the files and the memory that cameras need."""

    max_connections = 128


class WatchPage:
    """A running page. cameras: returns what to show of each camera; it must return at once."""

    def __init__(self, options: PageOptions, cameras: Cameras, desk: AlertDesk) -> None:
        """Start to serve. Raises ServerError."""
        host, port, password = options.address()
        port = choose_ports({"page": port}, host)["page"]
        self.url = f"http://{reachable_host(host)}:{port}/"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        app = Starlette(routes=_Handlers(cameras, desk).routes())
        config = server_config(
            _Door(app, password),
            _Connection,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        arguments = ([self._listener],)
        self._thread = threading.Thread(
            target=self._server.run, args=arguments, name="page", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ServerError("the page has not started")
            time.sleep(0.01)

    def close(self) -> None:
        """Stop to serve, within about two seconds."""
        self._server.should_exit = True
        self._thread.join(2.0)
        self._listener.close()


class _Door:
    """Refuses requests without the password, or without one, such with a foreign `Host`.

    Otherwise, a web page whose host name is made to point at this machine could read the pictures.
    """

    def __init__(self, app: Starlette, password: str) -> None:
        self._app = app
        self._password = password.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope)
        refusal: Response | None = None
        if self._password:
            if not self._knows_password(request.headers.get("authorization", "")):
                if "authorization" in request.headers:
                    await asyncio.sleep(WRONG_PASSWORD_SECONDS)
                challenge = {**NO_STORE, "www-authenticate": 'Basic realm="vlora watch"'}
                refusal = PlainTextResponse("The password is required.\n", 401, challenge)
        elif not _is_local_name(request.headers.get("host", "")):
            text = "Without a password, this page answers to localhost only.\n"
            refusal = PlainTextResponse(text, 403, NO_STORE)
        await (refusal or self._app)(scope, receive, send)

    def _knows_password(self, header: str) -> bool:
        kind, _, credentials = header.partition(" ")
        try:
            given = base64.b64decode(credentials, validate=True).partition(b":")[2]
        except ValueError:
            return False
        return kind.lower() == "basic" and hmac.compare_digest(given, self._password)


def _is_local_name(host: str) -> bool:
    try:
        return is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


class _Snapshot:
    """The last snapshot of all cameras, with the text that the page reads."""

    def __init__(self, cameras: Cameras, desk: AlertDesk) -> None:
        self._cameras, self._desk = cameras, desk
        self._time = float("-inf")
        self.views: Sequence[CameraView] = ()
        self.text, self.etag = b"", ""

    def refresh(self) -> _Snapshot:
        if time.monotonic() - self._time >= SNAPSHOT_SECONDS:
            self._time = time.monotonic()
            self.views = self._cameras()
            counts = self._desk.counts()
            cameras = [self._card(view, counts["events"]) for view in self.views]
            events = [_without_objects(record) for record in self._desk.newest()]
            state = {"cameras": cameras, "events": events, "sinks": counts["sinks"]}
            self.text = json.dumps(state).encode()
            self.etag = f'"{hashlib.sha256(self.text).hexdigest()[:32]}"'
        return self

    def _card(self, view: CameraView, events: dict[str, int]) -> dict[str, Any]:
        shown = {**view, "answer": view["answer"][:MAX_TEXT], "picture": bool(view["picture"])}
        return {**shown, "events": events.get(view["name"], 0)}


def _without_objects(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "objects"}


class _Handlers:
    """Answers of the paths of the page."""

    def __init__(self, cameras: Cameras, desk: AlertDesk) -> None:
        self._snapshot = _Snapshot(cameras, desk)
        self._desk = desk

    def routes(self) -> list[Route | Mount]:
        return [
            Route("/state", self.state),
            Route("/picture", self.picture),
            Route("/events/{name}", self.event_file),
            Route("/metrics", self.metrics),
            *(Route(f"/{name}", self.shared_file) for name in SHARED),
            Mount("/", StaticPages(directory=PAGE, html=True)),
        ]

    async def state(self, request: Request) -> Response:
        now = self._snapshot.refresh()
        headers = {**HEADERS, "etag": now.etag}
        if request.headers.get("if-none-match") == now.etag:
            return Response(status_code=304, headers=headers)
        return Response(now.text, headers=headers, media_type="application/json")

    async def picture(self, request: Request) -> Response:
        name = request.query_params.get("camera")
        views = self._snapshot.refresh().views
        found = next((view["picture"] for view in views if view["name"] == name), b"")
        if not found:
            return PlainTextResponse("There is no such picture.\n", 404, NO_STORE)
        return Response(found, headers=NO_STORE, media_type="image/jpeg")

    async def event_file(self, request: Request) -> Response:
        path = self._desk.store.path(request.path_params["name"])
        if path is None or not path.is_file():
            return PlainTextResponse("There is no such file.\n", 404, NO_STORE)
        return FileResponse(path, headers=NO_STORE)

    async def metrics(self, request: Request) -> Response:
        text = "".join(metric_lines(self._snapshot.refresh().views, self._desk.counts()))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def shared_file(self, request: Request) -> Response:
        return FileResponse(SHARED[request.url.path[1:]], headers=HEADERS)


# Metrics: name, kind, help and key. Labels are cameras and sinks, whose number the file bounds.
CAMERA_METRICS = (
    ("chunks_total", "counter", "Chunks that a camera has given.", "chunks"),
    ("dropped_chunks_total", "counter", "Chunks dropped because a newer one was there.", "drops"),
    ("reconnections_total", "counter", "Times a camera was connected again.", "reconnections"),
    ("gaps_total", "counter", "Interruptions in the times of a camera's frames.", "gaps"),
    ("errors_total", "counter", "Chunks whose request failed.", "errors"),
    ("damaged_frames_total", "counter", "Frames left out because packets were lost.", "damaged"),
    ("skipped_share", "gauge", "Share of the chunks not asked about, for no change.", "skipped"),
    ("lag_seconds", "gauge", "Seconds from a chunk's last frame to its answer.", "lag"),
)
SINK_METRICS = (
    ("sink_sent_total", "counter", "Messages that a sink has taken.", "sent"),
    ("sink_queued", "gauge", "Messages that wait for a sink.", "queued"),
    ("sink_dropped_total", "counter", "Messages dropped because a queue was full.", "dropped"),
    ("sink_refused_total", "counter", "Messages that a sink has refused for good.", "refused"),
    ("sink_failures_total", "counter", "Tries that failed and are repeated.", "failures"),
)
DESK_METRICS = (
    ("lost_events_total", "counter", "Events lost because the disk was too slow.", "lost"),
    ("media_errors_total", "counter", "Pictures and clips that failed.", "media_errors"),
    ("store_errors_total", "counter", "Files that could not be written.", "store_errors"),
    ("rule_timeouts_total", "counter", "Answers too slow for a regular expression.", "timeouts"),
)


def metric_lines(views: Sequence[CameraView], counts: dict[str, Any]) -> Iterator[str]:
    """Yield lines in Prometheus' text format."""
    for metric in CAMERA_METRICS:
        yield from _metric(metric, "camera", {view["name"]: dict(view) for view in views})
    events = {view["name"]: {"events": counts["events"].get(view["name"], 0)} for view in views}
    yield from _metric(("events_total", "counter", "Events begun.", "events"), "camera", events)
    for metric in SINK_METRICS:
        yield from _metric(metric, "sink", counts["sinks"])
    for metric in DESK_METRICS:
        yield from _metric(metric, "", {"": counts})


def _metric(
    metric: tuple[str, str, str, str], label: str, rows: dict[str, dict[str, Any]]
) -> Iterator[str]:
    name, kind, text, key = metric
    yield f"# HELP vlora_watch_{name} {text}\n# TYPE vlora_watch_{name} {kind}\n"
    for value, row in rows.items():
        if row[key] is not None:
            escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
            labels = f'{{{label}="{escaped}"}}' if label else ""
            yield f"vlora_watch_{name}{labels} {row[key]}\n"

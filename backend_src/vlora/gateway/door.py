"""The outermost layer of the gateway: it checks each request and writes a line to the access log.

**Invariant:** the log contains no keys, and of a request's body only the model's name.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import queue
import stat
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vlora.errors import ServerError, shown
from vlora.gateway.bodies import BodyReceiver
from vlora.gateway.errors import ApiError, error_response
from vlora.net import is_local
from vlora.sampling import MAX_STREAM_ID

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """Prometheus metrics of the gateway. No label's value can be chosen by clients."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "vlora_gateway_requests", "Requests answered.", ("route", "status"), registry=registry
        )
        help = "Seconds from a request's arrival to the end of its answer."
        self.seconds = Histogram(
            "vlora_gateway_request_seconds", help, ("route",), buckets=SECONDS, registry=registry
        )
        self.running = Gauge(
            "vlora_gateway_requests_running", "Requests being answered.", registry=registry
        )
        help = "Requests whose client disconnected before their end."
        self.disconnects = Counter("vlora_gateway_disconnects", help, registry=registry)
        help = "Lines of the access log that were lost because it could not be written."
        self.lost_lines = Counter("vlora_gateway_lost_log_lines", help, registry=registry)

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))


MIN_KEY_LENGTH = 16
WRONG_KEYS = ""  # Stands for a tenant of all requests without a known key.
ANYBODY = "-"  # Tenant of all requests to a gateway without keys.


class Keys:
    """Tenants by key. Only digests of the keys are kept."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._digests = [(_digest(key), tenant) for key, tenant in tenants.items()]
        self.several_tenants = len(set(tenants.values())) > 1

    def tenant(self, key: str) -> str | None:
        # The lookup takes the same time for every key, so its duration reveals nothing about a key.
        digest, found = _digest(key), None
        for known, tenant in self._digests:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyFile:
    """The keys in a file, read again after each change of it. Raises ServerError at first.

    **Invariant:** a file that cannot be used admits nobody.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._keys = load_keys(path)

    def current(self) -> Keys:
        """Return the present keys, none if the file cannot be used."""
        if (stamp := _stamp(self._path)) != self._stamp:
            self._stamp = stamp
            try:
                self._keys = load_keys(self._path)
            except ServerError as error:
                print(f"no API key is accepted: {error}", file=sys.stderr, flush=True)
                self._keys = Keys({})
        return self._keys


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode


def load_keys(path: Path) -> Keys:
    """Return the keys in a file of lines `TENANT KEY` and comments. A tenant may have several.
    Raises ServerError, whose message never contains a key.
    """
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            raise ServerError(f"anybody may write {path}; run `chmod o-w` on the file of keys")
        lines = path.read_text("ascii").splitlines()
    except OSError as error:
        raise ServerError(f"the keys in {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        # The error itself would show a part of a key.
        where = f"byte {error.start} is not ASCII, which keys and tenants must be"
        raise ServerError(f"the keys in {path} cannot be read: {where}") from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < MIN_KEY_LENGTH or len(words[0]) > MAX_STREAM_ID:
            form = f"TENANT KEY, with a key of at least {MIN_KEY_LENGTH} characters"
            raise ServerError(f"line {number} of {path} must be {form}")
        if words[1] in tenants:
            raise ServerError(f"line {number} of {path} repeats the key of another line")
        tenants[words[1]] = words[0]
    if not tenants:
        raise ServerError(f"{path} holds no keys; write one line TENANT KEY per key")
    return Keys(tenants)


@dataclass
class RateLimit:
    """Limits the requests per minute with one token bucket per tenant, which may send all requests
    of a minute at once.
    """

    per_minute: int
    clock: Callable[[], float] = time.monotonic
    # Requests that a tenant may send at a time. Tenants come from the file of keys, which bounds
    # their number.
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)

    def count(self, tenant: str) -> None:
        """Count one request. Raise ApiError if the tenant has sent too many."""
        now, rate = self.clock(), self.per_minute / 60
        left, at = self._buckets.get(tenant, (float(self.per_minute), now))
        left = min(self.per_minute, left + (now - at) * rate)
        self._buckets[tenant] = left - (left >= 1), now
        if left < 1:
            excess = f"more than {self.per_minute} requests per minute; try again later"
            raise ApiError("RATE_LIMITED", excess, retry_after=(1 - left) / rate)


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Paths that need no key, with everything below them. They reveal nothing and cost little.
OPEN_PATHS = ("/health", "/playground")
CORS = b"access-control-allow-origin"
API = "/v1/"  # Prefix of the paths that count toward a tenant's rate limit.


@dataclass
class Visit:
    """Fields of one request for the access log. Each is set as soon as its value is available."""

    id: str
    tenant: str = ANYBODY
    isolated: bool = False  # Whether there are other tenants, who must not notice the request.
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    code: str | None = None  # Code of the error that the request got, even within a stream.


MAX_LOGGED_PATH = 1024  # Maximum number of characters.
MAX_LOG_LINES = 10_000  # Maximum number of lines that wait to be written; more are lost.
LOG_RETRY_SECONDS = 1.0


class AccessLog:
    """Writes lines on a thread of its own, so that a full pipe or disk stops no request.

    When all lines that waited have been written, a line tells how many were lost before it.
    """

    def __init__(self, file: TextIO, lost_lines: Counter) -> None:
        self._file = file
        self._lost_lines = lost_lines
        self._lost = 0
        self._lines: queue.Queue[str] = queue.Queue(MAX_LOG_LINES)
        threading.Thread(target=self._run, name="access-log", daemon=True).start()

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1
            self._lost_lines.inc()

    def flush(self, seconds: float = 1.0) -> None:
        """Wait up to `seconds` until the lines are written."""
        end = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _run(self) -> None:
        told = 0
        while True:
            self._write(self._lines.get())
            if (lost := self._lost) > told and self._lines.empty():
                self._write(json.dumps({"time": _now(), "lost_lines": lost - told}) + "\n")
                told = lost
            self._lines.task_done()

    def _write(self, line: str) -> None:
        while True:
            try:
                self._file.write(line)
                line = ""  # It is in the file's buffer, and only flushing is tried again.
                self._file.flush()
            except (OSError, ValueError):  # A full disk, or a closed pipe or file.
                time.sleep(LOG_RETRY_SECONDS)
            else:
                return


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(eq=False)
class Door:
    """ASGI middleware that checks each request, then passes it to `app`.

    keys: API keys; None admits everybody.
    origins: origins of web pages that may use the gateway, in addition to its own.
    log: the access log, with one JSON object per line.
    """

    app: App
    keys: KeyFile | Keys | None
    limit: RateLimit | None
    origins: frozenset[str]
    metrics: GatewayMetrics
    log: AccessLog | TextIO

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. Pass other ASGI scopes, such as "lifespan", to `app`."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            self.log.flush()
            return
        visit = Visit(uuid.uuid4().hex)
        scope.setdefault("state", {})["visit"] = visit
        started = time.monotonic()
        status = 499
        body = BodyReceiver(scope["headers"], receive)
        origin = dict(scope["headers"]).get(b"origin", b"")

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                await body.discard_rest()
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", visit.id.encode())]
                # Otherwise, the page could not read errors, which this class or Starlette sends.
                if origin.decode("latin-1") in self.origins and CORS not in dict(headers):
                    headers += [(CORS, origin), (b"vary", b"Origin")]
                message["headers"] = headers
            await send(message)

        self.metrics.running.inc()
        try:
            try:
                self._check(scope, visit)
            except ApiError as error:
                visit.code = error.code
                await error_response(error)(scope, body, sending)
            else:
                await self.app(scope, body, sending)
        finally:
            seconds = time.monotonic() - started
            self.metrics.running.dec()
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            self._write(scope, visit, status, seconds)

    def _check(self, scope: Scope, visit: Visit) -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        for single in ("Host", "Authorization"):
            if sum(name == single.lower().encode() for name, _ in scope["headers"]) > 1:
                refusal = f"the request has more than one {single} header; send one"
                raise ApiError("INVALID_ARG", refusal)
        host = _host(headers.get("host", b"").decode("latin-1"))
        # Without keys, this prevents DNS rebinding by web pages.
        if self.keys is None and not is_local(host):
            refusal = f"the Host header names {host!r}; without keys, it must name"
            raise ApiError("PERMISSION_DENIED", f"{refusal} the gateway's machine")
        origin = headers.get("origin", b"").decode("latin-1")
        own = origin.partition("://")[2] == headers.get("host", b"").decode("latin-1")
        if origin and origin not in self.origins and not own:
            refusal = f"web pages of the origin {shown(origin)} may not use this gateway"
            raise ApiError("PERMISSION_DENIED", refusal)
        path = scope["path"]
        # Before a page's request, a browser sends OPTIONS without its key.
        is_open = path == "/" or scope["method"] == "OPTIONS"
        if is_open or any(path == open or path.startswith(f"{open}/") for open in OPEN_PATHS):
            return
        if self.keys is not None:
            keys = self.keys.current() if isinstance(self.keys, KeyFile) else self.keys
            try:
                visit.tenant = _tenant(keys, headers.get("authorization", b""))
            except ApiError:
                # All wrong keys share one bucket, because addresses can be many.
                if self.limit is not None:
                    self.limit.count(WRONG_KEYS)
                raise
            visit.isolated = keys.several_tenants
        if self.limit is not None and path.startswith(API):
            self.limit.count(visit.tenant)

    def _write(self, scope: Scope, visit: Visit, status: int, seconds: float) -> None:
        client = scope.get("client")
        line = {
            "time": _now(),
            "id": visit.id,
            "client": client[0] if client else None,
            "tenant": visit.tenant,
            "method": scope["method"],
            "path": scope["path"][:MAX_LOGGED_PATH],
            "status": status,
            "seconds": round(seconds, 4),
            "model": visit.model,
            "prompt_tokens": visit.prompt_tokens,
            "completion_tokens": visit.completion_tokens,
            "finish_reason": visit.finish_reason,
            "code": visit.code,
        }
        present = {key: value for key, value in line.items() if value is not None}
        self.log.write(json.dumps(present) + "\n")


def _tenant(keys: Keys, authorization: bytes) -> str:
    scheme, _, key = authorization.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key:
        remedy = "send the header Authorization: Bearer KEY"
        raise ApiError("UNAUTHENTICATED", f"the API key is missing; {remedy}")
    tenant = keys.tenant(key.strip())
    if tenant is None:
        raise ApiError("UNAUTHENTICATED", "the API key is not known")
    return tenant


def _host(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""

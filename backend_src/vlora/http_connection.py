"""HTTP connections with additions to uvicorn: limits, cancellation, ignored upgrades, and errors.

A request's head (everything before its body) and the number of chunks of its body are limited,
because the application cannot refuse a request before the head is complete.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vlora.errors import shown

# Maximum size in bytes of a request without its body. The network read that contains the start of a
# request is not counted; it has at most 256 KiB.
MAX_HEAD_BYTES = 64 * 1024

# Time limit in seconds for a head, from the start of the connection or the end of the last
# response.
HEAD_SECONDS = 30.0

# While bytes wait to be sent, a client must take so many in each period of so many seconds.
SENT_BYTES, SEND_SECONDS = 16 * 1024, 30.0

# Maximum number of bytes of framing for each byte of a body that is sent in chunks.
CHUNK_OVERHEAD = 8
MAX_SMALL_CHUNKS = 4096
# Limits of the chunks of a body. MAX_SMALL_CHUNKS chunks may have any size. If there are more, the
# others must have MIN_CHUNK_BYTES bytes on average. The number is limited because each chunk takes
# several calls of Python functions.
MIN_CHUNK_BYTES = 1024

# Maximum number of requests on a connection that wait until earlier ones are answered.
MAX_WAITING = 16


def server_config(app: Any, connection: type[LimitedConnection], **more: Any) -> uvicorn.Config:
    """Return uvicorn's settings of a server that logs nothing and trusts no header of a proxy."""
    return uvicorn.Config(
        app,
        http=connection,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        **more,
    )


class LimitedConnection(HttpToolsProtocol):
    """One HTTP connection, which is closed if a limit is exceeded.

    max_connections: limit of the server's connections, or None. Further ones are closed at once.
    """

    max_connections: int | None = None
    head_seconds = HEAD_SECONDS
    send_seconds = SEND_SECONDS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._chunks = self._body_bytes = 0
        self._has_head = False
        self._refusal: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._cycles: deque[RequestResponseCycle] = deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            transport.abort()
        transport.set_write_buffer_limits(0)  # Writing is paused while any byte waits to be sent.
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        self._notify_requests()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Take a client that has closed its sending side for one that has disconnected."""
        # Both look the same. The connection is closed once all bytes that wait have been sent.
        self._notify_requests()

    def _notify_requests(self) -> None:
        """Notify all requests of the connection that the client has disconnected."""
        # With pipelining, uvicorn would notify only the last one.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _start_send_timer(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.send_seconds, self._check_sent, waiting)

    def _check_sent(self, waited: int) -> None:
        """Close the connection unless enough of the bytes that `waited` have been sent."""
        if self.transport.get_write_buffer_size() > waited - SENT_BYTES:
            self.transport.abort()
        else:
            self._start_send_timer()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def data_received(self, data: bytes) -> None:
        """Read a part of a request. Refuse the request if its head is too large."""
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._start_timer()
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._ignore_offer(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self.send_400_response(self._refusal or f"the request is not valid HTTP: {error}")
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the head has more than {MAX_HEAD_BYTES} bytes, the limit")

    def send_400_response(self, msg: str) -> None:
        """Send an error in the form of the API, and close the connection."""
        kind = {"type": "invalid_request_error", "param": None, "code": "INVALID_ARG"}
        body = json.dumps({"error": {"message": msg, **kind}}).encode()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._chunks = self._body_bytes = 0
        self._has_head = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header. Ignore trailers, which follow a body and which no proxy has checked."""
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to answer the request, or queue it until the earlier ones are answered."""
        if self.parser.should_upgrade():
            return  # The parser raises an error next, whose handler calls `_ignore_offer`.
        self._has_head = True
        self._stop_timer()
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self._refuse(
                    f"the transfer encoding must be chunked, not {shown(value.decode('latin-1'))}"
                )
        if len(self.pipeline) >= MAX_WAITING:
            self._refuse(f"more than {MAX_WAITING} requests wait on this connection, the limit")
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_SMALL_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
            self._refuse(
                f"the body has {self._chunks} chunks with {self._body_bytes} bytes; more than"
                f" {MAX_SMALL_CHUNKS} chunks must have {MIN_CHUNK_BYTES} bytes on average"
            )

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._head_bytes = max(0, self._head_bytes - (1 + CHUNK_OVERHEAD) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _ignore_offer(self, rest: bytes) -> None:
        """Parse a request again from its head to `rest`, without its offer of another protocol."""
        # Such as `Upgrade: h2c` by Java's client. The parser stops before the body of the request.
        method = self.parser.get_method()
        if method == b"CONNECT":  # The method CONNECT always switches the protocol.
            self.send_400_response("the method CONNECT is not supported; the gateway is no proxy")
            return
        headers = [pair for pair in self.headers if pair[0] != b"upgrade"]
        lines = [b"%b %b HTTP/1.1" % (method, self.url), *map(b": ".join, headers), b"", rest]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn does.
        self.data_received(b"\r\n".join(lines))

    def _refuse(self, message: str) -> None:
        # The exception ends a callback of the parser. `data_received` sends the error.
        self._refusal = message
        raise ValueError(message)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

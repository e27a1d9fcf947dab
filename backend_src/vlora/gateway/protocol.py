"""Limits of a request's head, which uvicorn lacks: its size, and the time in which it must arrive.

The application sees a request only after its head. The parser joins the parts of a header again
whenever another part arrives. So without limits, one client could take all memory and time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of everything in a request but its body, besides the read in which it begins.

A read has at most 256 KiB.
"""

HEAD_SECONDS = 30.0
"""Time limit for a head, from the start of the connection or the end of the last response."""

CHUNK_OVERHEAD = 8
"""Maximum number of additional bytes for each byte of a body that is sent in chunks."""


class LimitedHeads(HttpToolsProtocol):
    """One HTTP connection, which is closed if a head exceeds a limit."""

    head_seconds = HEAD_SECONDS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request, unless its head is too large."""
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._start_timer()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head has more than {MAX_HEAD_BYTES} bytes, the limit.")

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Start to answer the request."""
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._head_bytes = max(0, self._head_bytes - (1 + CHUNK_OVERHEAD) * len(body))
        super().on_body(body)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

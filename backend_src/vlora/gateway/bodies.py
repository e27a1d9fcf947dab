"""Receiving of request bodies within limits of size, memory and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from fastapi import Request

from vlora.errors import shown
from vlora.gateway.errors import ApiError, invalid
from vlora.gateway.options import GatewayOptions

BODY_SECONDS = 60.0  # Time limit in seconds for receiving a body.

# Seconds after which a client should try again if there is no memory for its body.
RETRY_SECONDS = 1.0
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
DISCARD_SECONDS = 5.0  # Limits of bytes and of time for receiving the unused rest of a body.

# Number of commas above which a body is parsed in another thread. Parsing takes up to half a
# second, during which the event loop could serve no other request.
MANY_COMMAS = 4096
Parsed = TypeVar("Parsed")

# Function that counts additional bytes in memory. It raises ApiError if they exceed the limit.
Hold = Callable[[int], None]


class BodyReceiver:
    """Receives the body of one request part by part, and can discard the rest before an early
    answer, since a client that still sends usually reports a broken connection instead of an error.
    """

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    ) -> None:
        self._receive = receive
        names = dict(headers)
        self._ended = names.get(b"content-length", b"0") == b"0" and (
            b"transfer-encoding" not in names
        )
        # A client with `Expect: 100-continue` sends its body only after the first `receive`.
        self._waits = b"expect" in names

    async def __call__(self) -> MutableMapping[str, Any]:
        self._waits = False
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._ended = True
        return message

    async def discard_rest(self) -> None:
        """Receive the rest of the body without keeping it, until a limit is reached."""
        received = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not (self._ended or self._waits) and received < MAX_DISCARDED_BYTES:
                    received += len((await self()).get("body", b""))


class Bodies:
    """Receives and parses the request bodies of one event loop, and bounds their total size."""

    def __init__(self, options: GatewayOptions) -> None:
        self._limit = options.max_body_bytes
        self._max_held = options.max_held_bytes
        self._held = 0
        # A single thread, so that such bodies together take at most one core.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="parser")

    def close(self) -> None:
        self._parser.shutdown(cancel_futures=True)

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """Yield a function that counts bytes of a body toward the limit of all bodies together,
        until the block ends.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if self._held + size > self._max_held:
                excess = f"the bodies of all requests have more than {self._max_held} bytes"
                reason = f"{excess}, the limit; try again later"
                raise ApiError("UNAVAILABLE", reason, retry_after=RETRY_SECONDS)
            held += size
            self._held += size

        try:
            yield hold
        finally:
            self._held -= held

    async def parse(self, body: bytearray, read: Callable[[bytearray], Parsed]) -> Parsed:
        """Return the result of `read` for a body. Bodies with many commas are read on a thread."""
        if len(body) <= MANY_COMMAS or body.count(b",") <= MANY_COMMAS:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(self._parser, read, body)

    async def receive(self, request: Request, hold: Hold) -> bytearray:
        """Return the body of a request, which must be JSON and not too large. Raises ApiError, or
        ClientDisconnect if the client disconnects before the body is complete.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise invalid(None, f"the content type must be application/json, not {kind!r}")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise invalid(None, f"the content encoding must be identity, not {shown(encoding)}")
        # The HTTP parser has checked that this is a number. A chunked body has no length.
        if int(request.headers.get("content-length", "0")) > self._limit:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    hold(len(part))
                    body += part
                    if len(body) > self._limit:
                        raise self._too_large()
        except TimeoutError:
            reason = f"the body did not arrive within {BODY_SECONDS:g} s"
            raise ApiError("TIMEOUT", reason) from None
        return body

    def _too_large(self) -> ApiError:
        return ApiError("TOO_LARGE", f"the body has more than {self._limit} bytes, the limit")

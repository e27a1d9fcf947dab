"""Receiving of request bodies within limits of size, memory and time."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from fastapi import Request

from vlora.errors import shown
from vlora.gateway.errors import ApiError, invalid
from vlora.gateway.options import GatewayOptions

BODY_SECONDS = 60.0  # Time limit in seconds for receiving a body.
# A client must send so many bytes in each period of so many seconds, until the body is complete.
WINDOW_BYTES, WINDOW_SECONDS = 160 * 1024, 10.0
# Maximum size of a body without the content of its data URLs. Of JSON, every few bytes can be a
# value, which takes many times as much memory and time.
MAX_JSON_BYTES = 4 * 1024 * 1024
DATA_URL = b'"data:'
URL_COST = 64  # Bytes that a data URL counts.
# End of the keys whose values may be data URLs. A text that only looks like one counts fully.
URL_KEY = re.compile(rb'url"\s{0,16}:\s{0,16}\Z')
URL_KEY_BYTES = 48
ESCAPE_COST = 2  # Bytes that a backslash in a data URL counts. PHP writes each `/` as `\/`.

TENANT_SHARE = 0.5  # Share of the memory for bodies that one tenant may have.
# Size of a body above which it may not use the last part of that memory.
SMALL_BYTES = 1024 * 1024
SHARE_OF_LARGE = 7 / 8

# Seconds after which a client should try again if there is no memory for its body.
RETRY_SECONDS = 1.0
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
DISCARD_SECONDS = 5.0  # Limits of bytes and of time for receiving the unused rest of a body.

# Number of bytes above which a body is parsed, or base64 decoded, in another thread. It takes up to
# half a second, during which the event loop could serve no other request.
# Of short bodies, those with many values take milliseconds.
LONG_BYTES, LONG_COMMAS = 64 * 1024, 1024
Body = TypeVar("Body", bytearray, str)
Parsed = TypeVar("Parsed")


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


class Held:
    """The bytes of one request that count toward the limit of all requests together.

    all: bytes of all requests, by tenant.
    has_share: whether its tenant may have a share of the memory only.
    """

    def __init__(
        self, all: defaultdict[str, int], tenant: str, has_share: bool, max_held: int
    ) -> None:
        self._all = all
        self.tenant = tenant
        self._limit = max_held * (TENANT_SHARE if has_share else 1.0)
        self._max_held = max_held
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count additional bytes. Raises ApiError if they exceed a limit at present."""
        size_after = self._bytes + size
        limit = self._max_held * (1.0 if size_after <= SMALL_BYTES else SHARE_OF_LARGE)
        excess = None
        if sum(self._all.values()) + size > limit:
            excess = f"the bodies of all requests have more than {limit:.0f} bytes"
        elif self._all[self.tenant] + size > self._limit:
            excess = f"your requests have more than {self._limit:.0f} bytes"
        if excess is not None:
            reason = f"{excess}, the limit; try again later"
            raise ApiError("UNAVAILABLE", reason, retry_after=RETRY_SECONDS)
        self._all[self.tenant] += size
        self._bytes = size_after

    def release(self) -> None:
        """Stop counting, because the bytes were passed on. Any further call has no effect."""
        self._all[self.tenant] -= self._bytes
        self._bytes = 0
        if not self._all[self.tenant]:
            del self._all[self.tenant]


class _UrlScanner:
    """Finds data URLs in a body while it arrives.

    json_bytes: number of bytes received so far that are not the content of a data URL.
    """

    def __init__(self) -> None:
        self.json_bytes = 0
        self._at = 0
        self._in_url = False

    def scan(self, body: bytearray) -> None:
        """Read on in a body, to which bytes have been appended."""
        while True:
            if self._in_url:
                # The content of a data URL has no escaped quotes.
                end = body.find(b'"', self._at)
                content = body[self._at : len(body) if end < 0 else end]
                # Base64 is ASCII. Decoding anything else takes as long as that of other texts.
                escapes = ESCAPE_COST * content.count(b"\\")
                self.json_bytes += escapes if content.isascii() else len(content)
                self._at = len(body) if end < 0 else end + 1
                if end < 0:
                    return
                self._in_url = False
            start = body.find(DATA_URL, self._at)
            # At the end there may be the first bytes of `DATA_URL`.
            end = max(self._at, len(body) - len(DATA_URL) + 1) if start < 0 else start
            self.json_bytes += end - self._at
            self._at = end
            if start < 0 or self.json_bytes > MAX_JSON_BYTES:
                return
            self.json_bytes += URL_COST
            self._at += len(DATA_URL)
            self._in_url = bool(URL_KEY.search(body[max(0, start - URL_KEY_BYTES) : start]))


class Bodies:
    """Receives and parses the request bodies of one event loop, and bounds their total size."""

    def __init__(self, options: GatewayOptions) -> None:
        self._limit = options.max_body_bytes
        self._max_held = options.max_held_bytes
        self._has_shares = options.keys is not None
        self._held: defaultdict[str, int] = defaultdict(int)
        # One thread for bodies with many values, so that these together take at most one core. Each
        # takes up to a second, so pictures, which take milliseconds, have a thread of their own.
        self._parsers = {
            many: ThreadPoolExecutor(1, thread_name_prefix=name)
            for many, name in ((True, "parser of values"), (False, "parser"))
        }
        # Each tenant gives it one body at a time, so that none waits behind all of another's. Keys
        # bound the number of tenants.
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def close(self) -> None:
        for parser in self._parsers.values():
            parser.shutdown(cancel_futures=True)

    @contextmanager
    def holding(self, tenant: str) -> Iterator[Held]:
        """Yield the count of a request's bytes, which are released at the end of the block."""
        held = Held(self._held, tenant, self._has_shares, self._max_held)
        try:
            yield held
        finally:
            held.release()

    async def parse(self, body: Body, read: Callable[[Body], Parsed], tenant: str) -> Parsed:
        """Return the result of `read` for a tenant's body or URL. Long ones are read on a thread,
        after those that the tenant sent before.
        """
        many = isinstance(body, bytearray) and body.count(b",") > LONG_COMMAS
        if len(body) <= LONG_BYTES and not many:
            return read(body)
        parser = self._parsers[many]
        async with self._turns[tenant]:
            return await asyncio.get_running_loop().run_in_executor(parser, read, body)

    async def receive(self, request: Request, held: Held) -> bytearray:
        """Return the body of a request, which must be JSON and not too large. Raises ApiError, or
        ClientDisconnect if the client disconnects before the body is complete.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise invalid(None, f"the content type must be application/json, not {shown(kind)}")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise invalid(None, f"the content encoding must be identity, not {shown(encoding)}")
        # The HTTP parser has checked that this is a number. A chunked body has no length.
        if int(request.headers.get("content-length", "0")) > self._limit:
            raise self._too_large()
        body, scanner = bytearray(), _UrlScanner()
        async for part in _timely(request.stream()):
            held.add(len(part))
            body += part
            if len(body) > self._limit:
                raise self._too_large()
            scanner.scan(body)
            if scanner.json_bytes > MAX_JSON_BYTES:
                raise too_much_json()
        return body

    def _too_large(self) -> ApiError:
        return ApiError("TOO_LARGE", f"the body has more than {self._limit} bytes, the limit")


def too_much_json() -> ApiError:
    reason = "the request has more than"
    return ApiError(
        "TOO_LARGE", f"{reason} {MAX_JSON_BYTES} bytes without its images, which is the limit"
    )


async def _timely(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body. Raises ApiError if they arrive too slowly."""
    loop = asyncio.get_running_loop()
    until, window, missing = loop.time() + BODY_SECONDS, loop.time() + WINDOW_SECONDS, WINDOW_BYTES
    while True:
        try:
            async with asyncio.timeout_at(min(until, window)):
                part = await anext(parts, None)
        except TimeoutError:
            if loop.time() >= until:
                reason = f"the body did not arrive within {BODY_SECONDS:g} s"
            else:
                reason = f"fewer than {WINDOW_BYTES} bytes of the body came in {WINDOW_SECONDS:g} s"
            raise ApiError("TIMEOUT", reason) from None
        if part is None:
            return
        missing -= len(part)
        if missing <= 0:
            window, missing = loop.time() + WINDOW_SECONDS, WINDOW_BYTES
        yield part

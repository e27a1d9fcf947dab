"""Work that ends when the client of a request disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from vlora.gateway.door import Receive

Result = TypeVar("Result")


class Disconnected(Exception):
    """Raised when the client has closed its connection."""


async def connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise
    Disconnected.

    The request's body must have been received already.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for waiting in (task, gone):
            if not waiting.done():
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

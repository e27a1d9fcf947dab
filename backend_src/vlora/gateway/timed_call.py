"""A gRPC call whose operations have a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


class TimedCall:
    """Sends the request of one gRPC call and reads its messages.

    Each of these operations has a time limit. One timer serves all of them, because a new timer for
    each would be expensive. When the timer fires, it either detects a timeout or restarts itself
    for the current operation.
    """

    def __init__(self, call: Any, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._late = False
        self._timer = self._loop.call_later(seconds, self._check)

    async def send(self, request: bytes) -> None:
        """Send the only request. Raise TimeoutError if the server does not take it in time."""
        await self._limited(self._call.write(request))
        await self._limited(self._call.done_writing())

    async def next(self) -> Any:
        """Return the next message, or EOF. Raise TimeoutError if none arrives in time."""
        return await self._limited(self._call.read())

    async def _limited(self, operation: Awaitable[Any]) -> Any:
        self._waiting_since = self._loop.time()
        try:
            return await operation
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._late and task is not None and not task.cancelling():
                raise TimeoutError from None
            raise
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Cancel the call and the timer."""
        self._timer.cancel()
        self._call.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        since = now if self._waiting_since is None else self._waiting_since
        if now >= since + self._seconds:
            self._late = True
            self._call.cancel()
        else:
            self._timer = self._loop.call_at(since + self._seconds, self._check)

"""Waits for the first answer of the V-LoRA server, and tells the operator if it does not answer.

A gateway may start before its server, as in Kubernetes. Requests get status 503 in the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vlora.gateway.backend import Backend
from vlora.gateway.channel import RECONNECT_SECONDS
from vlora.gateway.errors import ApiError


async def wait_for_first_answer(
    backend: Backend,
    address: str,
    say: Callable[[str], None],
    retry_seconds: float = RECONNECT_SECONDS,
) -> None:
    """Return once the server at `address` answers.

    If it does not answer at once, report the reason, and later that it answers.

    say: function that prints a message for the operator.
    retry_seconds: seconds between a failed attempt and the next one.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            await backend.describe()
        except ApiError as error:
            if attempts == 1:
                say(
                    f"warning: no answer from the server at {address} yet: {error.message}\n"
                    "  Start it with `vlora serve`, or name the gRPC address of another one with"
                    " --grpc HOST:PORT.\n"
                    f"  The gateway tries again every {retry_seconds:g} s. Until the server"
                    " answers, requests get status 503."
                )
            await asyncio.sleep(retry_seconds)
        else:
            if attempts > 1:
                say(f"the server at {address} answers now")
            return

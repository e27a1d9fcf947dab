"""Runs a gateway in the foreground."""

from __future__ import annotations

import asyncio
import ctypes
import math
import signal
import socket
import sys

import uvicorn

from vlora.errors import ServerError
from vlora.gateway.app import make_app
from vlora.gateway.bodies import DISCARD_SECONDS
from vlora.gateway.door import App
from vlora.gateway.options import GatewayOptions
from vlora.http_connection import LimitedConnection, server_config
from vlora.net import (
    GRPC_ADDRESS,
    MAX_PORT,
    check_host,
    check_keys,
    choose_ports,
    raise_file_limit,
    reachable_host,
)

# Seconds for which an idle connection is kept. Proxies usually keep theirs for 60 s.
KEEP_ALIVE_SECONDS = 75
# Seconds for sending errors to the requests that outlast the grace period, with what their clients
# still upload.
LAST_SECONDS = math.ceil(DISCARD_SECONDS) + 1
BACKLOG = 2048  # Maximum number of connections that wait to be accepted.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # Numbers of options in glibc's malloc.h.

# Size of freed memory that is kept, and of blocks that glibc maps separately and therefore returns.
KEPT_BYTES = 64 * 1024 * 1024
MMAP_BYTES = 4 * 1024 * 1024


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an IP address and whose connections have TCP_NODELAY."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Without it, a response of two writes waits 40 ms for the client's acknowledgement. asyncio
    # sets it only on sockets that name their protocol, which those of `create_server` do not.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def keep_freed_memory() -> None:
    """Let the C library reuse large freed blocks."""
    # By default, it returns them to the system, which clears new pages for each image.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # Only glibc has this function.
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, MMAP_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)


class Server(uvicorn.Server):
    """Cancels the requests that outlast the grace period, so that they send an error as their end.

    uvicorn would cancel them when it closes what they need for this.

    failure: why it has stopped by itself, or None.
    """

    failure: ServerError | None = None

    def __init__(self, app: App, grace_seconds: float) -> None:
        config = server_config(
            app,
            LimitedConnection,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(grace_seconds) + LAST_SECONDS,
        )
        super().__init__(config)
        self._grace_seconds = grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_seconds, self._cancel_requests)
        await super().shutdown(sockets)

    def fail(self, error: ServerError) -> None:
        self.failure = error
        self.should_exit = True

    def _cancel_requests(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


def serve(options: GatewayOptions) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish. Raises ServerError."""
    raise_file_limit()
    keep_freed_memory()
    parts = GRPC_ADDRESS.fullmatch(options.grpc)
    if parts is None or int(parts[1]) > MAX_PORT:
        raise ServerError(f"--grpc takes HOST:PORT, as in 127.0.0.1:8001, not '{options.grpc}'")
    check_host(options.host)
    check_keys(options.host, options.keys, "--keys")
    chosen = choose_ports({"port": options.port}, options.host)
    app = make_app(options, lambda error: server.fail(error))
    server = Server(app, options.grace_seconds)
    with listen(options.host, chosen["port"]) as listener:
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn handles these signals itself, and raises them again when it has ended.
            signal.signal(number, lambda *_: sys.exit(0))
        print(f"gateway   http://{reachable_host(options.host)}:{chosen['port']}/v1", flush=True)
        server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure

"""The gateway's gRPC connection to a V-LoRA server."""

from __future__ import annotations

import grpc.aio

from vlora.launcher.direct import grpc_options

RECONNECT_SECONDS = 2.0
"""Maximum number of seconds between two attempts to connect. gRPC's default is two minutes, so a
server that starts after the gateway would be noticed late.
"""

OPTIONS = (
    # Other code limits the sizes of requests and answers.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", int(1000 * RECONNECT_SECONDS)),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to a server, which connects when it is first used.

    address: host:port of the gRPC endpoint.
    """
    host = address.rpartition(":")[0]
    return grpc.aio.insecure_channel(address, [*OPTIONS, *grpc_options(host)])

"""Options of a gateway, for `vlora gateway` and `vlora serve --gateway-port`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlora.errors import ServerError
from vlora.net import LOOPBACK, Tls

MIB = 1024 * 1024


@dataclass(frozen=True)
class GatewayOptions:
    """Options of a gateway.

    host, port: IP address and port that the gateway listens on.
    grpc: address of the V-LoRA server, host:port, or dns:///host:port for all addresses of a name.
    tls: files for an encrypted connection to it; None for an unencrypted one.
    keys: file of API keys; None admits everybody, which is allowed on a loopback address only.
    requests_per_minute: limit for each tenant; None for no limit.
    image_hosts: hosts from which images may be fetched, HOST or HOST:PORT; none by default.
    metrics_url: URL of the server's metrics, which are appended to the gateway's own, or None.
    max_body_bytes: maximum size of a request's body, and of all images fetched for it.
    max_held_bytes: maximum size of all request bodies, and fetched images, in memory.
    max_fetch_bytes, fetch_seconds: limits of one fetched image.
    answer_seconds: time limit for sending a request to the server, and for each response.
    grace_seconds: seconds that running requests get to finish when the gateway stops.
    """

    host: str = LOOPBACK
    port: int = 8080
    grpc: str = f"{LOOPBACK}:8001"
    tls: Tls | None = None
    base_name: str = "base"
    keys: Path | None = None
    requests_per_minute: int | None = None
    image_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    metrics_url: str | None = None
    max_body_bytes: int = 64 * MIB
    max_held_bytes: int = 512 * MIB
    max_fetch_bytes: int = 16 * MIB
    fetch_seconds: float = 10.0
    answer_seconds: float = 600.0
    grace_seconds: float = 30.0


def check_base_name(name: str, is_taken: bool, option: str) -> None:
    """Raise ServerError if an adapter has the base model's name, which `option` sets."""
    if is_taken:
        raise ServerError(
            f"an adapter is named '{name}', which is the name of the base model in the gateway;"
            f" rename the adapter, or the base model by {option}, or its requests would get the"
            " base model's answers"
        )

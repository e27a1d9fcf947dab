"""Exposure of a server: the address it listens on, and the protocols that are closed to clients."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from vlora.launcher.assembly import ServerError

LOOPBACK = "127.0.0.1"

CLOSED = ("model-repository", "trace", "logging")
"""Protocols of Triton that let any client load models, write files or change the log."""

SHARED_MEMORY = "shared-memory"
"""Triton's protocol by which clients register shared memory on the server's machine.

It is closed unless an option opens it. Through a registered region, a client can read and write
everything that the server can open, including other clients' requests.
"""

RESTRICTIONS = ("--http-restricted-api", "--grpc-restricted-protocol")
HEADER = "vlora-closed"


def check_host(host: str) -> None:
    """Raise ServerError unless `host` is an IP address.

    With a host name, Triton 2.51 opens only the gRPC port on that host's address, and the other
    ports on 255.255.255.255.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ServerError(
            f"--host {host} is not an IP address; use {LOOPBACK} for clients on this machine,"
            " 0.0.0.0 for all networks, or the address of one interface"
        ) from None


def check_keys(host: str, keys: Path | None, option: str) -> None:
    """Raise ServerError if a gateway is open to a network and has no file of API keys.

    host: IP address that the gateway listens on.
    keys: file of API keys, or None.
    option: name of the option for the file, for the message.
    """
    if keys is None and not ipaddress.ip_address(host).is_loopback:
        raise ServerError(
            f"--host {host} opens the gateway to a network, which needs API keys; name a file with"
            f" {option} (a line 'TENANT KEY' for each key)"
        )


def reachable_host(host: str) -> str:
    """Return the host part of a local URL of a server that listens on `host`."""
    address = ipaddress.ip_address(host)
    if address.version == 4:
        return LOOPBACK if address.is_unspecified else host
    return "[::1]" if address.is_unspecified else f"[{host}]"


def listen_arguments(host: str, ports: Mapping[str, int]) -> list[str]:
    """Return Triton's arguments for its listeners.

    host: an IP address.
    ports: port of each of the listeners `http`, `grpc` and `metrics`.
    """
    is_v6 = ":" in host
    addresses = dict.fromkeys(ports, f"ipv6:{host}" if is_v6 else host)
    addresses["grpc"] = f"[{host}]" if is_v6 else host
    return [
        argument
        for name, port in ports.items()
        for argument in (f"--{name}-address={addresses[name]}", f"--{name}-port={port}")
    ]


def closing_arguments(allow_shared_memory: bool, given: Sequence[str]) -> list[str]:
    """Return the arguments with which Triton closes protocols over HTTP and gRPC.

    A closed protocol requires a header with a random value that is stored nowhere.

    allow_shared_memory: whether to leave the protocol SHARED_MEMORY open.
    given: the operator's own arguments for Triton. A protocol that they restrict is not closed
        here.
    """
    closed = CLOSED if allow_shared_memory else (SHARED_MEMORY, *CLOSED)
    arguments = []
    for option in RESTRICTIONS:
        restricted = _restricted_by(option, given)
        if names := [name for name in closed if name not in restricted]:
            arguments.append(f"{option}={','.join(names)}:{HEADER}={secrets.token_hex(32)}")
    return arguments


def _restricted_by(option: str, given: Sequence[str]) -> set[str]:
    """Return the protocols that the operator's arguments restrict.

    The arguments have the form `OPTION=NAME,…:KEY=VALUE` or `OPTION NAME,…:KEY=VALUE`.
    """
    values = [word.removeprefix(f"{option}=") for word in given if word.startswith(f"{option}=")]
    values += [value for word, value in pairwise(given) if word == option]
    return {name.strip() for value in values for name in value.partition(":")[0].split(",")}

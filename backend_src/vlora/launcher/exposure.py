"""The address that a server listens on, and the protocols that it closes to clients."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise

from vlora.launcher.assembly import ServerError

LOOPBACK = "127.0.0.1"

CLOSED = ("model-repository", "trace", "logging")
"""Triton's protocols that load models, write files and change the log, for any client."""

SHARED_MEMORY = "shared-memory"
"""Triton's protocol with which clients register shared memory of the server's machine.

It is closed unless an option opens it: a client that may register regions can read and write all
that the server can open, also those with other clients' requests.
"""

RESTRICTIONS = ("--http-restricted-api", "--grpc-restricted-protocol")
HEADER = "vlora-closed"


def check_host(host: str) -> None:
    """Raise ServerError unless `host` is an IP address.

    For a name, Triton 2.51 opens the gRPC port on its address, but the others on 255.255.255.255.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ServerError(
            f"--host {host} is not an IP address; use {LOOPBACK} for clients on this machine,"
            " 0.0.0.0 for all networks, or the address of one interface"
        ) from None


def reachable_host(host: str) -> str:
    """Return the host, as in a URL, by which this machine reaches a server that listens there."""
    address = ipaddress.ip_address(host)
    if address.version == 4:
        return LOOPBACK if address.is_unspecified else host
    return "[::1]" if address.is_unspecified else f"[{host}]"


def listen_arguments(host: str, ports: Mapping[str, int]) -> list[str]:
    """Return Triton's arguments for its listeners.

    host: an IP address. ports: by the listeners' names, `http`, `grpc` and `metrics`.
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

    A closed protocol would need a header with a random value, which is stored nowhere.

    given: the operator's own arguments of Triton. A protocol that these restrict is left to them.
    """
    closed = CLOSED if allow_shared_memory else (SHARED_MEMORY, *CLOSED)
    arguments = []
    for option in RESTRICTIONS:
        restricted = _restricted_by(option, given)
        if names := [name for name in closed if name not in restricted]:
            arguments.append(f"{option}={','.join(names)}:{HEADER}={secrets.token_hex(32)}")
    return arguments


def _restricted_by(option: str, given: Sequence[str]) -> set[str]:
    """Return the protocols in arguments `OPTION=NAME,…:KEY=VALUE` or `OPTION NAME,…:KEY=VALUE`."""
    values = [word.removeprefix(f"{option}=") for word in given if word.startswith(f"{option}=")]
    values += [value for word, value in pairwise(given) if word == option]
    return {name.strip() for value in values for name in value.partition(":")[0].split(",")}

"""Choice of a server's ports, before anything is started."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from vlora.launcher.assembly import ServerError

MAX_PORT = 65535
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the first and the last of the kernel's ephemeral ports."""
FREE_PORTS = range(20000, 30000)
"""Ports from which a free one is chosen. Only those below the ephemeral ports are used."""
TRIES = 100
"""Maximum number of ports in FREE_PORTS that are tried."""


def choose_ports(requested: Mapping[str, int], host: str = "0.0.0.0") -> dict[str, int]:
    """Return different ports by name (such as `http_port`), all of which are free at this moment.

    requested: port by name; 0 chooses a free one.
    host: IP address to listen on.

    Raises ServerError, which names the address or the port, what is wrong with it, and the option
    that changes it.
    """
    check_ports(requested)
    with ExitStack() as stack:
        # All sockets are open at the same time, so that no free port is chosen twice.
        return {name: _bind(stack, host, name, port) for name, port in requested.items()}


def check_ports(requested: Mapping[str, int]) -> None:
    """Raise ServerError if a number is not a port, or if two ports are equal.

    requested: port by name; 0 stands for any free one.
    """
    for name, port in requested.items():
        if not 0 <= port <= MAX_PORT:
            raise ServerError(
                f"{_flag(name)} {port} is not a port; choose one from 1 to {MAX_PORT}, or 0 for a"
                " free one"
            )
    for port in requested.values():
        equal = [_flag(other) for other in requested if requested[other] == port]
        if port and len(equal) > 1:
            raise ServerError(f"{' and '.join(equal)} are both {port}; choose different ports")


def _bind(stack: ExitStack, host: str, name: str, port: int) -> int:
    """Bind a socket to the port, or to a free one for 0. Return the port."""
    probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    if port:
        # Otherwise, the port of a listener that was closed recently would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    candidates = [port] if port else [*_free_candidates(), 0]
    for candidate in candidates:
        try:
            probe.bind((host, candidate))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ServerError(f"--host {host} is not an address of this machine") from None
            if error.errno == errno.EADDRINUSE and candidate != candidates[-1]:
                continue
            why = {errno.EADDRINUSE: "is already in use", errno.EACCES: "is reserved for root"}
            reason = why.get(error.errno or 0, f"cannot be opened ({error.strerror})")
            raise ServerError(
                f"port {port} {reason}; choose another with {_flag(name)} N, or 0 for a free one"
            ) from None
        break
    return int(probe.getsockname()[1])


def _free_candidates() -> list[int]:
    """Return random ports below the kernel's ephemeral ports.

    The server opens its ports seconds after they were chosen. Until then, the kernel could assign
    an ephemeral port to any other socket of this machine.
    """
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    ports = range(FREE_PORTS.start, min(FREE_PORTS.stop, first))
    return random.SystemRandom().sample(ports, min(TRIES, len(ports)))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""Choice of a server's ports, before anything is started."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from vlora.launcher.assembly import ServerError

MAX_PORT = 65535


def choose_ports(requested: Mapping[str, int], host: str = "0.0.0.0") -> dict[str, int]:
    """Return different ports by name (such as `http_port`), all of which are free at this moment.

    requested: port by name; 0 chooses a free one.
    host: IP address to listen on.

    Raises ServerError, which names the address or the port, what is wrong with it, and the option
    that changes it.
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
    with ExitStack() as stack:
        # All sockets are open at the same time, so that no free port is chosen twice.
        return {name: _bind(stack, host, name, port) for name, port in requested.items()}


def _bind(stack: ExitStack, host: str, name: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = stack.enter_context(socket.socket(family))
    if port:
        # Otherwise, the port of a listener that was closed recently would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ServerError(f"--host {host} is not an address of this machine") from None
        why = {errno.EADDRINUSE: "is already in use", errno.EACCES: "is reserved for root"}
        reason = why.get(error.errno or 0, f"cannot be opened ({error.strerror})")
        raise ServerError(
            f"port {port} {reason}; choose another with {_flag(name)} N, or 0 for a free one"
        ) from None
    return int(probe.getsockname()[1])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

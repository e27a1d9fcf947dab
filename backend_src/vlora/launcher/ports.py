"""The ports of a server: given or any free ones, checked before anything is started."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from vlora.launcher.assembly import ServerError

HIGHEST = 65535


def choose_ports(given: Mapping[str, int]) -> dict[str, int]:
    """Definite ports for these names (`http_port`, …), all different and free right now.

    0 stands for any free one. Raises ServerError naming the port, what is wrong with it and the
    option that chooses another.
    """
    for name, port in given.items():
        if not 0 <= port <= HIGHEST:
            raise ServerError(
                f"{_flag(name)} {port} is no port; choose one from 1 to {HIGHEST}, or 0 for any"
                " free one"
            )
    for port in given.values():
        equal = [_flag(other) for other in given if given[other] == port]
        if port and len(equal) > 1:
            raise ServerError(f"{' and '.join(equal)} are both {port}; each needs its own")
    with ExitStack() as stack:
        # Held open together: a free one is never one that was given, nor twice the same.
        return {name: _bind(stack, name, port) for name, port in given.items()}


def _bind(stack: ExitStack, name: str, port: int) -> int:
    probe = stack.enter_context(socket.socket())
    if port:  # else a listener that ended lately would count as one
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("0.0.0.0", port))
    except OSError as error:
        why = {errno.EADDRINUSE: "is taken", errno.EACCES: "is reserved for root"}
        reason = why.get(error.errno or 0, f"cannot be opened ({error.strerror})")
        raise ServerError(
            f"port {port} {reason}; choose another with {_flag(name)} N, or 0 for any free one"
        ) from None
    return int(probe.getsockname()[1])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

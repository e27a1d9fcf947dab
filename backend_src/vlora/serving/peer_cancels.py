"""Passes cancellations on to the other replicas of this machine.

Envoy sends a cancellation to one server, and its request may be at any. Each replica has a datagram
socket in a folder of `vlora serve --replicas`, which only this user can open.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from vlora.errors import VLoraError
from vlora.server_run import PEERS_VARIABLE

log = logging.getLogger(__name__)

MAX_ID_BYTES = 4096  # Clients' ids have at most 1,024 characters.
SEND_SECONDS = 1.0  # A replica that does not read is left out.


class PeerCancels:
    """The socket of this process, if it belongs to one of several replicas."""

    def __init__(self) -> None:
        folder = os.environ.get(PEERS_VARIABLE)
        self._folder = Path(folder) if folder else None
        self._own: Path | None = None

    def listen(self, cancel: Callable[[str], None]) -> None:
        """Call `cancel` with each id that another replica passes on, on a thread of its own.

        Further calls do nothing.
        """
        if self._folder is not None and self._own is None:
            self._own = self._folder / f"{os.getpid()}.cancels"
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            own.bind(str(self._own))
            arguments = [own, cancel]
            threading.Thread(target=_listen, args=arguments, name="peers", daemon=True).start()

    def send(self, client_id: str) -> None:
        """Pass the id of a cancelled request on to all other replicas; never raises."""
        for path in () if self._folder is None else self._folder.glob("*.cancels"):
            if path == self._own:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
                peer.settimeout(SEND_SECONDS)
                try:
                    peer.sendto(client_id.encode(), str(path))
                except (ConnectionRefusedError, FileNotFoundError):  # That replica has ended.
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("a replica was not told of a cancellation: %s", error)

    def close(self) -> None:
        """End the thread by an empty message to the own socket, and remove the socket."""
        if self._own is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
                own.sendto(b"", str(self._own))
            self._own.unlink(missing_ok=True)


def _listen(own: socket.socket, cancel: Callable[[str], None]) -> None:
    with own:
        while raw := own.recv(MAX_ID_BYTES):
            try:
                cancel(raw.decode())
            except VLoraError as error:
                log.warning("a cancellation of another replica failed: %s", error)

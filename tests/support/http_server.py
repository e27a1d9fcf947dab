"""A web server that sends bytes of the test's choice, also such that are not valid HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress


def response(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def http_server(respond: Callable[[], bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the port of a web server, and the requests that it got."""
    requests: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # The client may have left.
                    requests.append(connection.recv(65536))
                    connection.sendall(respond())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], requests
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()

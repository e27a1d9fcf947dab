"""`python -m tests.support.failing_fork`: a fork server that cannot fork the first two times.

Its processes wait until their connection is closed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from vlora import fork_server


def main() -> None:
    fork: Callable[[], int] = os.fork
    failures = iter((True, True))

    def fork_or_fail() -> int:
        if next(failures, False):
            raise BlockingIOError(errno.EAGAIN, "no process is left")
        return fork()

    os.fork = fork_or_fail
    fork_server.serve(lambda connection: connection.recv(1))


if __name__ == "__main__":
    main()

"""Stamps, which pass the time of a request's arrival from one model to the next.

The first model of this project that a request reaches makes the stamp. Times are seconds of
CLOCK_MONOTONIC, which all processes of a host share.

**Invariant:** a client cannot choose the arrival of its request. A stamp is authenticated by a key
that only the models of one server have. A model accepts each stamp only once, within
`MAX_AGE_SECONDS` after it was made.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vlora.errors import InvalidArgument
from vlora.server_run import RUN_VARIABLE
from vlora.serving.tensors import Array, Inputs, Tensors, strings

# An output of `vision_encoder`, and an input of the models after it.
ARRIVAL_INPUT = "arrival_stamp"
MAX_AGE_SECONDS = 10.0  # Maximum age of a stamp. Passing a request on takes milliseconds.
KEY_BYTES = 32
_CONTENT = struct.Struct("<dd8s")  # Arrival, time of the stamp, and unique random bytes.
_BYTES = _CONTENT.size + hashlib.sha256().digest_size


class ArrivalStamps:
    """Makes and reads arrival stamps. Thread-safe.

    key: key that the models of a server share. If it is empty, no stamp is made or accepted.
    """

    def __init__(self, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = key
        self._clock = clock
        self._lock = threading.Lock()
        # Stamps, with the time at which each was read.
        self._used: OrderedDict[bytes, float] = OrderedDict()

    @staticmethod
    def of_this_server() -> ArrivalStamps:
        """Return an object with the key of the server that runs this process.

        Without `vlora serve` there is no key, and each model takes the time at which it gets a
        request.
        """
        run = os.environ.get(RUN_VARIABLE)
        return ArrivalStamps(shared_key(Path(run)) if run else b"")

    def make(self, arrival: float) -> Array:
        """Return a stamp for one call of another model: STRING[1], an empty string without a key.

        arrival: seconds of CLOCK_MONOTONIC.
        """
        if not self._key:
            return strings([b""])
        content = _CONTENT.pack(arrival, self._clock(), secrets.token_bytes(8))
        return strings([content + self._tag(content)])

    def read(self, tensors: Tensors) -> float:
        """Return the arrival of a request in seconds of CLOCK_MONOTONIC.

        It is the present time if the stamp is missing, too old or was used before. Raises
        InvalidArgument for a stamp that this server did not make.
        """
        now = self._clock()
        stamp = Inputs(tensors).blob(ARRIVAL_INPUT, _BYTES)
        if not stamp:
            return now
        content = stamp[: _CONTENT.size]
        if not self._key or not hmac.compare_digest(stamp[_CONTENT.size :], self._tag(content)):
            raise InvalidArgument(
                f"'{ARRIVAL_INPUT}' was not made by this server; leave it out: only the models set"
                " it for each other"
            )
        arrival, made, _ = _CONTENT.unpack(content)
        return float(arrival) if self._is_first_use(content, made, now) else now

    def _is_first_use(self, content: bytes, made: float, now: float) -> bool:
        with self._lock:
            while self._used and next(iter(self._used.values())) < now - MAX_AGE_SECONDS:
                self._used.popitem(last=False)
            if content in self._used or made < now - MAX_AGE_SECONDS:
                return False
            self._used[content] = now
            return True

    def _tag(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")


def shared_key(folder: Path) -> bytes:
    """Return the key in the private folder of a server's run. The first call creates it."""
    path = folder / "arrival.key"
    draft = folder / f"arrival.key.{secrets.token_hex(8)}"
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    with suppress(FileExistsError):
        path.hardlink_to(draft)
    draft.unlink()
    return path.read_bytes()

"""API keys and rate limits of the gateway.

A file of keys has one line `TENANT KEY` per key. Lines that begin with # are comments. A tenant may
have several keys, so that an old key can be replaced by a new one.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vlora.gateway.errors import ApiError
from vlora.launcher.assembly import ServerError

MIN_KEY_LENGTH = 16

ANYBODY = "-"
"""Tenant of all requests to a gateway without keys."""


class Keys:
    """Tenants by key. Only digests of the keys are kept."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """Store the digests of the keys.

        tenants: tenant by key.
        """
        self._digests = [(_digest(key), tenant) for key, tenant in tenants.items()]

    def tenant(self, key: str) -> str | None:
        """Return the tenant of a key; None for an unknown key.

        The lookup takes the same time for every key, so its duration reveals nothing about a key.
        """
        digest, found = _digest(key), None
        for known, tenant in self._digests:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load_keys(path: Path) -> Keys:
    """Return the keys in a file. Raises ServerError, whose message never contains a key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServerError(f"the keys in {path} cannot be read: {reason}") from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < MIN_KEY_LENGTH:
            raise ServerError(
                f"line {number} of {path} must be TENANT KEY, with a key of at least"
                f" {MIN_KEY_LENGTH} characters"
            )
        if words[1] in tenants:
            raise ServerError(f"line {number} of {path} repeats the key of another line")
        tenants[words[1]] = words[0]
    if not tenants:
        raise ServerError(f"{path} holds no keys; write one line TENANT KEY per key")
    return Keys(tenants)


@dataclass
class _Bucket:
    """Token bucket of one tenant.

    requests: number of requests that the tenant may send at time `at`.
    at: seconds on the clock of the rate limit.
    """

    requests: float
    at: float


@dataclass
class RateLimit:
    """Limits the number of requests per minute with one token bucket per tenant.

    A tenant may send all requests of a minute at once. Tenants come from the file of keys, so the
    number of buckets is bounded.
    """

    per_minute: int
    clock: Callable[[], float] = time.monotonic
    _buckets: dict[str, _Bucket] = field(default_factory=dict)

    def count(self, tenant: str) -> None:
        """Count one request. Raise ApiError if the tenant has sent too many."""
        now, rate = self.clock(), self.per_minute / 60
        bucket = self._buckets.setdefault(tenant, _Bucket(float(self.per_minute), now))
        bucket.requests = min(self.per_minute, bucket.requests + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.requests < 1:
            raise ApiError(
                "RATE_LIMITED",
                f"more than {self.per_minute} requests per minute; try again later",
                retry_after=(1 - bucket.requests) / rate,
            )
        bucket.requests -= 1

"""Handle of one version of one adapter.

It follows the version from its folder through host memory into a slot of the LoRA operator. A
request gets the handle when it is first scheduled and keeps it until it ends. So the request
finishes with the version that it started with, even if the folder changes meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from vlora.errors import InvalidArgument
from vlora.lora.adapter import Adapter, AdapterInfo, Description
from vlora.lora.transient import Backoff
from vlora.memory.eviction import EVICT_FIRST
from vlora.memory.pool import Run

Stamp = bytes
"""Fingerprint of a folder's files (link targets, sizes, times). Any change of the files
changes it.
"""


def version_of(stamp: Stamp) -> str:
    """Return a name for a version of a folder. All processes of a server get the same name."""
    return hashlib.sha256(stamp).hexdigest()


class State(Enum):
    """Location of a version's weights, or the operation that is moving them."""

    ON_DISK = "on disk"
    LOADING = "loading"
    IN_MEMORY = "in memory"
    PACKING = "packing"
    RESIDENT = "resident"
    FAILED = "failed"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    # The weights may have been read together with the description.
    State.ON_DISK: frozenset({State.LOADING, State.IN_MEMORY}),
    # Back on disk: the read failed and is tried again, or the weights are no longer needed.
    State.LOADING: frozenset({State.IN_MEMORY, State.ON_DISK, State.FAILED}),
    # Back on disk: the host copy was evicted.
    State.IN_MEMORY: frozenset({State.PACKING, State.ON_DISK}),
    # Back in memory: packing failed and is tried again.
    State.PACKING: frozenset({State.RESIDENT, State.IN_MEMORY, State.FAILED}),
    # Back in memory: the adapter was evicted from the pool.
    State.RESIDENT: frozenset({State.IN_MEMORY}),
    # Only another version of the adapter can be loaded.
    State.FAILED: frozenset(),
}
"""States that may follow each state. No other transitions happen."""

COPIED = (State.IN_MEMORY, State.PACKING, State.RESIDENT)
"""States in which a version has a host copy: its weights in fp32 in host memory."""


@dataclass(eq=False)
class AdapterHandle:
    """State of one version of an adapter.

    Only the engine's thread changes a handle. Other threads may read `info` and `description` and
    compute `packed_bytes`, which is the same on any thread.

    info: description of the adapter. After the first load it includes the digest and never changes.
    adapter: the host copy; set only in the states of COPIED.
    slot, run: slot of the operator, and pages of the packed copy; set only in PACKING and RESIDENT.
        Without a page pool there is no run.
    error: reason why the version cannot be loaded; set only in FAILED.
    retired: True once the name means another version. New requests cannot use this one.
    backoff: delay after failed attempts whose cause lay outside the files.
    packed_bytes: size of the packed copy; 0 until computed.
    """

    name: str
    folder: Path
    stamp: Stamp = field(repr=False)
    description: Description = field(repr=False)
    state: State = State.ON_DISK
    adapter: Adapter | None = field(default=None, repr=False)
    slot: int | None = None
    run: Run | None = None
    error: InvalidArgument | None = None
    retired: bool = False
    backoff: Backoff = field(default_factory=Backoff, repr=False)
    packed_bytes: int = 0
    _last_used: int = field(default=0, repr=False)
    _pins: int = field(default=0, repr=False)
    _holders: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.info: AdapterInfo = self.description.info

    # -- transitions -----------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.name!r}: {self.state} → {state}"
        self.state = state

    def load(self) -> None:
        """Note that the weights are being read."""
        self._enter(State.LOADING)

    def load_later(self) -> None:
        """Note that the weights were not read."""
        self._enter(State.ON_DISK)

    def loaded(self, adapter: Adapter) -> None:
        """Store the host copy. If the version was read before, its digest must be the same."""
        assert adapter.info.digest, "weights have a digest"
        assert self.info.digest in ("", adapter.info.digest), "a version has one digest"
        self._enter(State.IN_MEMORY)
        self.adapter, self.info = adapter, adapter.info

    def drop(self) -> None:
        self._enter(State.ON_DISK)
        self.adapter = None

    def pack(self, slot: int, run: Run | None) -> None:
        """Note that the weights are being packed into a slot."""
        self._enter(State.PACKING)
        self.slot, self.run = slot, run

    def packed(self) -> None:
        """Note that the version is packed, so that steps can use its slot."""
        self._enter(State.RESIDENT)

    def unpack(self) -> None:
        """Note that the version has lost its slot and its pages."""
        self._enter(State.IN_MEMORY)
        self.slot = self.run = None

    def fail(self, error: InvalidArgument) -> None:
        """Store the reason why the version cannot be loaded or packed."""
        self._enter(State.FAILED)
        self.error = error
        self.adapter = self.slot = self.run = None

    # -- use -------------------------------------------------------------------------------------

    @property
    def resident(self) -> bool:
        """True if steps can use the version."""
        return self.state is State.RESIDENT

    @property
    def digest(self) -> str:
        """Digest of the weights, which must have been read."""
        assert self.info.digest, f"adapter {self.name!r} has not been read"
        return self.info.digest

    @property
    def pinned(self) -> bool:
        """True if a running request, paused or not, needs the version in the pool."""
        return self._pins > 0

    @property
    def held(self) -> bool:
        """True if a request that has started uses this version. The host copy is then kept."""
        return self._holders > 0

    @property
    def obsolete(self) -> bool:
        """True if no request can use this version again."""
        return self.retired and not self.held

    @property
    def last_used(self) -> int:
        """Time of the last use on the pool's clock (see `memory/eviction.py`)."""
        return EVICT_FIRST if self.obsolete else self._last_used

    @last_used.setter
    def last_used(self, now: int) -> None:
        self._last_used = now

    @property
    def needs_host_copy(self) -> bool:
        """True if the host copy may not be evicted."""
        return self.state in (State.PACKING, State.RESIDENT) or self.held

    def pin(self) -> None:
        self._pins += 1

    def unpin(self) -> None:
        assert self._pins > 0, f"adapter {self.name!r} is not pinned"
        self._pins -= 1

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        assert self._holders > 0, f"adapter {self.name!r} is not held"
        self._holders -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError if the fields do not fit the state."""
        assert (self.adapter is not None) == (self.state in COPIED)
        assert (self.slot is not None) == (self.state in (State.PACKING, State.RESIDENT))
        assert self.run is None or self.slot is not None
        assert (self.error is not None) == (self.state is State.FAILED)
        assert self.adapter is None or self.info is self.adapter.info, "not its own digest"

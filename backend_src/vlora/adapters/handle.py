"""Handle of one version of one adapter.

A request holds the handle from its first step until it ends. So it finishes with the version that
it started with, even if the folder changes meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from vlora.adapters.errors import Backoff
from vlora.adapters.files import Adapter, AdapterDescription, AdapterInfo
from vlora.errors import InvalidArgument
from vlora.memory.pool import EVICT_FIRST, Run

# Fingerprint of a folder's files (link targets, sizes, times). Any change of the files changes it.
Stamp = bytes


def version_of(stamp: Stamp) -> str:
    """Return a name for a version of a folder. All processes of a server derive the same name."""
    return hashlib.sha256(stamp).hexdigest()


class AdapterState(Enum):
    """Location of a version's weights, or the operation that is moving them."""

    ON_DISK = "on disk"
    LOADING = "loading"
    IN_MEMORY = "in memory"
    PACKING = "packing"
    RESIDENT = "resident"
    FAILED = "failed"


# States that may follow each state. No other transitions happen.
TRANSITIONS: Mapping[AdapterState, set[AdapterState]] = {
    # The weights may have been read together with the description.
    AdapterState.ON_DISK: {AdapterState.LOADING, AdapterState.IN_MEMORY},
    # ON_DISK follows if reading failed and is tried again, or if the weights are no longer needed.
    AdapterState.LOADING: {AdapterState.IN_MEMORY, AdapterState.ON_DISK, AdapterState.FAILED},
    # ON_DISK follows if the host copy is evicted.
    AdapterState.IN_MEMORY: {AdapterState.PACKING, AdapterState.ON_DISK},
    # IN_MEMORY follows if packing failed and is tried again.
    AdapterState.PACKING: {AdapterState.RESIDENT, AdapterState.IN_MEMORY, AdapterState.FAILED},
    # IN_MEMORY follows if the adapter is evicted from the pool.
    AdapterState.RESIDENT: {AdapterState.IN_MEMORY},
    # Only another version of the adapter can be loaded.
    AdapterState.FAILED: set(),
}

# States in which a version has a host copy: its weights in fp32 in host memory.
COPIED = (AdapterState.IN_MEMORY, AdapterState.PACKING, AdapterState.RESIDENT)

# States in which a version has a slot of the operator.
IN_SLOT = (AdapterState.PACKING, AdapterState.RESIDENT)


@dataclass(eq=False)
class AdapterHandle:
    """State of one version of an adapter. Only the engine's thread changes it. Other threads may
    read `info` and `description` and compute `packed_bytes`, which is the same on all.

    info: description of the adapter. After the first load it includes the digest and never changes.
    adapter: the host copy; set only in the states of COPIED.
    slot, run: slot of the operator and pages of the packed copy; set only in the states of IN_SLOT.
    error: reason why the version cannot be loaded; set only in FAILED.
    retired: True once the adapter's name refers to another version.
    backoff: delay before the next attempt after failures that the adapter's files did not cause.
    packed_bytes: size of the packed copy in bytes; 0 until computed.
    stays_loaded: whether the present version of the adapter stays in the pool without requests.
    """

    name: str
    folder: Path
    stamp: Stamp = field(repr=False)
    description: AdapterDescription = field(repr=False)
    state: AdapterState = AdapterState.ON_DISK
    adapter: Adapter | None = field(default=None, repr=False)
    slot: int | None = None
    run: Run | None = None
    error: InvalidArgument | None = None
    retired: bool = False
    backoff: Backoff = field(default_factory=Backoff, repr=False)
    packed_bytes: int = 0
    stays_loaded: bool = False
    _last_used: int = field(default=0, repr=False)
    _pins: int = field(default=0, repr=False)
    _holders: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.info: AdapterInfo = self.description.info

    def enter(self, state: AdapterState) -> None:
        """Change the state, and drop what a version in the new state does not have. The caller sets
        the fields that the new state needs (see `check_integrity`).
        """
        assert state in TRANSITIONS[self.state], f"{self.name!r}: {self.state} → {state}"
        self.state = state
        if state not in COPIED:
            self.adapter = None
        if state not in IN_SLOT:
            self.slot = self.run = None

    @property
    def resident(self) -> bool:
        return self.state is AdapterState.RESIDENT

    def may_begin(self, now: float) -> bool:
        """Return whether a load or packing may begin at the time `now`, in seconds."""
        settled = self.state in (AdapterState.RESIDENT, AdapterState.FAILED)
        return not settled and self.backoff.due <= now

    @property
    def digest(self) -> str:
        assert self.info.digest, f"adapter {self.name!r} has not been read"
        return self.info.digest

    @property
    def pinned(self) -> bool:
        """True if a request that holds pages needs the version to stay in the pool."""
        return self._pins > 0

    @property
    def held(self) -> bool:
        """True if a started request uses this version. Its host copy must then be kept."""
        return self._holders > 0

    @property
    def obsolete(self) -> bool:
        """True if no request can use this version again."""
        return self.retired and not self.held

    @property
    def last_used(self) -> int:
        """Time of the last use on the pool's clock (see `memory/pool.py`)."""
        return EVICT_FIRST if self.obsolete else self._last_used

    @last_used.setter
    def last_used(self, now: int) -> None:
        self._last_used = now

    @property
    def needs_host_copy(self) -> bool:
        return self.state in IN_SLOT or self.held

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
        """Raise AssertionError if the fields that are set do not fit the state."""
        assert (self.adapter is not None) == (self.state in COPIED)
        assert (self.slot is not None) == (self.state in IN_SLOT)
        assert (self.run is not None) == (self.state in IN_SLOT)
        assert (self.error is not None) == (self.state is AdapterState.FAILED)
        assert self.adapter is None or self.info is self.adapter.info, "not its own digest"

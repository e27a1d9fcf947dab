"""Handle of one version of one adapter, from its folder to a slot of the operator.

A request takes the handle when it is first scheduled and keeps it until it ends: it finishes with
the version that it started with, whatever happens to the folder meanwhile.
"""

from __future__ import annotations

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
"""Fingerprint of a folder's files (link targets, sizes, times): it differs after any change."""


class State(Enum):
    """Location of a version's weights, or what is being done to change it."""

    ON_DISK = "on disk"
    LOADING = "loading"
    IN_MEMORY = "in memory"
    PACKING = "packing"
    RESIDENT = "resident"
    FAILED = "failed"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    # The weights may have been read together with the description.
    State.ON_DISK: frozenset({State.LOADING, State.IN_MEMORY}),
    # Back on disk: the read failed and is tried again, or the result is not needed any more.
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
"""States that may follow each state. Every change of a handle's state is one of these."""

COPIED = (State.IN_MEMORY, State.PACKING, State.RESIDENT)
"""States in which a version has its host copy."""


@dataclass(eq=False)
class AdapterHandle:
    """State of one version of an adapter.

    Only the engine's thread changes a handle. Other threads read `info` and `description`, and may
    compute `packed_bytes`, with the same result.

    info: description of the adapter. It includes the digest from the first load on, so in each
        state in which there are weights, and never changes after that.
    adapter: the host copy, in the states of COPIED only.
    slot, run: index in the operator and pages, in the states PACKING and RESIDENT only; without a
        pool there is no run.
    error: why it cannot be loaded, in the state FAILED only.
    retired: whether its name no longer means this version, which no new request can use.
    backoff: failed attempts to load or pack it for a reason outside of its files.
    packed_bytes: size of its packed copies; 0 until it has been computed.
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
        """Keep the host copy. Its digest is the one that the handle has, if it has one."""
        assert adapter.info.digest, "weights have a digest"
        assert self.info.digest in ("", adapter.info.digest), "a version has one digest"
        self._enter(State.IN_MEMORY)
        self.adapter, self.info = adapter, adapter.info

    def drop(self) -> None:
        """Drop the host copy."""
        self._enter(State.ON_DISK)
        self.adapter = None

    def pack(self, slot: int, run: Run | None) -> None:
        """Note that the weights are being packed into a slot."""
        self._enter(State.PACKING)
        self.slot, self.run = slot, run

    def packed(self) -> None:
        """Note that steps can use the slot."""
        self._enter(State.RESIDENT)

    def unpack(self) -> None:
        """Note that it has no slot and no pages any more."""
        self._enter(State.IN_MEMORY)
        self.slot = self.run = None

    def fail(self, error: InvalidArgument) -> None:
        """Note why it can be neither loaded nor packed."""
        self._enter(State.FAILED)
        self.error = error
        self.adapter = self.slot = self.run = None

    # -- use -------------------------------------------------------------------------------------

    @property
    def resident(self) -> bool:
        """True if steps can use it."""
        return self.state is State.RESIDENT

    @property
    def digest(self) -> str:
        """Digest of the weights, which must have been read."""
        assert self.info.digest, f"adapter {self.name!r} has not been read"
        return self.info.digest

    @property
    def pinned(self) -> bool:
        """True if a running or paused request needs it to stay resident."""
        return self._pins > 0

    @property
    def held(self) -> bool:
        """True if a request has started with this version, which keeps its host copy."""
        return self._holders > 0

    @property
    def obsolete(self) -> bool:
        """True if no request can use this version again."""
        return self.retired and not self.held

    @property
    def last_used(self) -> int:
        """Time of the last use on the pool's clock, see `memory/eviction.py`."""
        return EVICT_FIRST if self.obsolete else self._last_used

    @last_used.setter
    def last_used(self, now: int) -> None:
        self._last_used = now

    @property
    def needs_host_copy(self) -> bool:
        """True if the host copy is in use and cannot be evicted."""
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
        """Raise AssertionError if the state and what belongs to it disagree."""
        assert (self.adapter is not None) == (self.state in COPIED)
        assert (self.slot is not None) == (self.state in (State.PACKING, State.RESIDENT))
        assert self.run is None or self.slot is not None
        assert (self.error is not None) == (self.state is State.FAILED)
        assert self.adapter is None or self.info is self.adapter.info, "not its own digest"

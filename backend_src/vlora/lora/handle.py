"""Handle of one version of one adapter, from its folder to a slot of the operator.

A request takes the handle when it is first scheduled and keeps it until it ends: it finishes with
the version that it started with, whatever happens to the folder meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vlora.errors import InvalidArgument
from vlora.lora.adapter import Adapter, AdapterInfo, Description
from vlora.memory.pool import Run

Stamp = bytes
"""Fingerprint of a folder's files (link targets, sizes, times): it differs after any change."""


@dataclass(eq=False)
class AdapterHandle:
    """State of one version of an adapter.

    Only the adapter store changes it, under its lock; `pin`, `hold` and their opposites belong to
    the engine's thread.

    adapter: the host copy, or None.
    slot: index in the operator while the adapter is resident, from packing to eviction.
    run: its pages, allocated before it is packed.
    error: why it cannot be loaded.
    retired: whether its name means another version, or none.
    last_used: time of the last use on the pool's clock, see `memory/eviction.py`.
    loading: whether a job of the loader or the packer is working on it.
    packed_bytes: size of its packed copies; 0 until it has been computed.
    """

    name: str
    folder: Path
    stamp: Stamp
    description: Description
    adapter: Adapter | None = None
    slot: int | None = None
    run: Run | None = None
    error: InvalidArgument | None = None
    retired: bool = False
    last_used: int = 0
    loading: bool = False
    packed_bytes: int = 0
    _pins: int = field(default=0, repr=False)
    _holders: int = field(default=0, repr=False)

    @property
    def info(self) -> AdapterInfo:
        """Description of the adapter; it includes the digest once the weights have been loaded."""
        return self.description.info if self.adapter is None else self.adapter.info

    @property
    def resident(self) -> bool:
        """True if steps can use it."""
        return self.slot is not None

    @property
    def pinned(self) -> bool:
        """True if a running or paused request needs it to stay resident."""
        return self._pins > 0

    @property
    def held(self) -> bool:
        """True if a request has started with this version, which keeps its host copy."""
        return self._holders > 0

    @property
    def needs_host_copy(self) -> bool:
        """True if the host copy is in use and cannot be evicted."""
        return self.resident or self.loading or self.held or self.run is not None

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

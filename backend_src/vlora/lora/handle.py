"""One version of one adapter, from its folder to a slot of the operator.

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
"""What tells that a folder's files are the same: where links lead, sizes, times."""


@dataclass(eq=False)
class AdapterHandle:
    """Changed by the store alone, under its lock; `pin` and its like are the engine thread's.

    adapter: the host's copy, where it has one. slot: in the operator, from when it is packed until
    it is evicted. run: its pages, taken before it is packed. error: why it does not load. used: on
    the pool's clock. loading: a job of the loader has it. needed: bytes once packed.
    """

    name: str
    folder: Path
    stamp: Stamp
    description: Description
    adapter: Adapter | None = None
    slot: int | None = None
    run: Run | None = None
    error: InvalidArgument | None = None
    used: int = 0
    loading: bool = False
    needed: int = 0
    _pins: int = field(default=0, repr=False)
    _holders: int = field(default=0, repr=False)

    @property
    def info(self) -> AdapterInfo:
        """With its digest from when it has been loaded."""
        return self.description.info if self.adapter is None else self.adapter.info

    @property
    def resident(self) -> bool:
        """Whether a step can use it."""
        return self.slot is not None

    @property
    def pinned(self) -> bool:
        """Whether a running or paused request needs it where it is."""
        return self._pins > 0

    @property
    def held(self) -> bool:
        """Whether a request has started with this version: its host copy stays."""
        return self._holders > 0

    def pin(self) -> None:
        self._pins += 1

    def unpin(self) -> None:
        assert self._pins > 0, f"adapter {self.name!r} is not pinned"
        self._pins -= 1

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        assert self._holders > 0, f"adapter {self.name!r} is not held"
        self._holders -= 1

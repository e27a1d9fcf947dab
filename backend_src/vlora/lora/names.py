"""Adapters by name: the handle that a name means now, or the error of a folder that is unusable.

The engine's thread changes the mapping and publishes it as a table that never changes, which other
threads read without a lock. `lora/store.py` keeps track of where a handle's weights are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from vlora.errors import InvalidArgument, NotFound, known_names
from vlora.lora.handle import AdapterHandle
from vlora.lora.peft_config import as_text

MAX_HINT_LENGTH = 256
"""Maximum length of an unknown name for which a similar one is searched."""

HINT_NEIGHBOURS = 16
"""Number of names before and after an unknown one, in each of two orders, that are compared with
it. Comparing a pair of names takes some 70 µs."""


@dataclass(frozen=True)
class NameTable:
    """Meaning of all names at one time. Never changes, so any thread may read it.

    current: adapters that requests can use.
    broken: errors of adapters that exist but do not load.
    """

    current: Mapping[str, AdapterHandle]
    broken: Mapping[str, InvalidArgument]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that requests can use, in order."""
        return tuple(sorted(self.current))

    @cached_property
    def _backwards(self) -> Sequence[str]:
        return sorted(name[::-1] for name in self.names)

    def handle(self, name: str) -> AdapterHandle:
        """Return the present version. Raise NotFound, which lists the known names, or the
        InvalidArgument of an adapter that does not load."""
        if name in self.broken:
            raise self.broken[name]
        if name not in self.current:
            hint = known_names(name, self.names, self.similar(name))
            raise NotFound(f"unknown adapter '{name}'{hint}")
        return self.current[name]

    def similar(self, name: str) -> Sequence[str]:
        """Return at most 4 · HINT_NEIGHBOURS names that may be similar to an unknown one.

        They are its neighbours in the order of names and in the order of names read backwards: an
        error in one place leaves a beginning or an end of at least half the length.
        """
        if len(name) > MAX_HINT_LENGTH:
            return ()
        backwards = _neighbours(self._backwards, name[::-1])
        both = [*_neighbours(self.names, name), *(found[::-1] for found in backwards)]
        return tuple(dict.fromkeys(both))


def _neighbours(words: Sequence[str], word: str) -> Sequence[str]:
    """Return the nearest neighbors of `word`, before and after it, in a sorted sequence."""
    position = bisect_left(words, word)
    return words[max(0, position - HINT_NEIGHBOURS) : position + HINT_NEIGHBOURS]


class AdapterNames:
    """Mapping from names to handles. Belongs to the engine's thread, except for `table`."""

    def __init__(self) -> None:
        self._current: dict[str, AdapterHandle] = {}
        self._broken: dict[str, InvalidArgument] = {}
        self._changed = False
        self.table = NameTable({}, {})
        """The last published table; replaced as a whole."""

    def set(self, handle: AdapterHandle) -> AdapterHandle | None:
        """Let the handle's name mean this version; return the one that it meant before."""
        name = as_text(handle.name)
        previous = self.remove(handle.name)
        self._current[name] = handle
        return previous

    def set_broken(self, name: str, error: InvalidArgument) -> AdapterHandle | None:
        """Let a name mean an error; return the version that it meant before."""
        previous = self.remove(name)
        self._broken[as_text(name)] = error
        return previous

    def remove(self, name: str) -> AdapterHandle | None:
        """Remove a name; return the version that it meant."""
        self._changed = True
        self._broken.pop(as_text(name), None)
        return self._current.pop(as_text(name), None)

    def __contains__(self, name: str) -> bool:
        """Return whether the name means a version that requests can use."""
        return as_text(name) in self._current

    def is_current(self, handle: AdapterHandle) -> bool:
        """Return whether the handle's name still means this version."""
        return self._current.get(as_text(handle.name)) is handle

    def publish(self) -> None:
        """Make all changes visible to other threads."""
        if self._changed:
            self.table = NameTable(
                MappingProxyType(dict(self._current)), MappingProxyType(dict(self._broken))
            )
            self._changed = False

"""Adapters by name. Each name refers to a handle, or to the error of a folder that cannot be used.

The engine's thread changes the mapping. It publishes each state as an immutable table, which other
threads read without a lock.
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
from vlora.lora.routing import Router

MAX_HINT_LENGTH = 256
"""Maximum length of an unknown name for which similar names are suggested."""

HINT_NEIGHBOURS = 16
"""Number of names before and after an unknown name that are compared with it, in each of two
orders.

Comparing two names takes about 70 µs.
"""


@dataclass(frozen=True)
class NameTable:
    """Adapters by name at one moment. Immutable, so any thread may read it.

    current: adapters that requests can use.
    broken: errors of adapters that exist but cannot be loaded.
    """

    current: Mapping[str, AdapterHandle]
    broken: Mapping[str, InvalidArgument]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Sorted names of the adapters that requests can use."""
        return tuple(sorted(self.current))

    @cached_property
    def _backwards(self) -> Sequence[str]:
        return sorted(name[::-1] for name in self.names)

    @cached_property
    def router(self) -> Router:
        """Chooses one of these adapters for a request that names none."""
        return Router({name: handle.info.skills for name, handle in self.current.items()})

    def handle(self, name: str) -> AdapterHandle:
        """Return the present version of an adapter.

        Raises NotFound, which lists known names, or InvalidArgument if the adapter cannot be
        loaded.
        """
        if name in self.broken:
            raise self.broken[name]
        if name not in self.current:
            hint = known_names(name, self.names, self.similar(name))
            raise NotFound(f"unknown adapter '{name}'{hint}")
        return self.current[name]

    def similar(self, name: str) -> Sequence[str]:
        """Return names that may be similar to an unknown one, at most 4 · HINT_NEIGHBOURS.

        They are the neighbors of the unknown name in two sorted lists: the names, and the names
        spelled backwards. A single typing error leaves the first or the last half of a name
        correct. So the intended name is near the unknown name in one of the two lists.
        """
        if len(name) > MAX_HINT_LENGTH:
            return ()
        backwards = _neighbours(self._backwards, name[::-1])
        both = [*_neighbours(self.names, name), *(found[::-1] for found in backwards)]
        return tuple(dict.fromkeys(both))


def _neighbours(words: Sequence[str], word: str) -> Sequence[str]:
    """Return up to HINT_NEIGHBOURS words before and after the position of `word` in a sorted
    sequence.
    """
    position = bisect_left(words, word)
    return words[max(0, position - HINT_NEIGHBOURS) : position + HINT_NEIGHBOURS]


class AdapterNames:
    """Mapping from names to handles.

    Only the engine's thread may use it, but any thread may read `table`.
    """

    def __init__(self) -> None:
        self._current: dict[str, AdapterHandle] = {}
        self._broken: dict[str, InvalidArgument] = {}
        self._changed = False
        self.table = NameTable({}, {})
        """The table that was published last. The object itself never changes; `publish` replaces
        it.
        """

    def set(self, handle: AdapterHandle) -> AdapterHandle | None:
        """Make this version the current one of its name; return the previous version, or None."""
        name = as_text(handle.name)
        previous = self.remove(handle.name)
        self._current[name] = handle
        return previous

    def set_broken(self, name: str, error: InvalidArgument) -> AdapterHandle | None:
        """Map a name to an error; return the version that the name referred to before, or None."""
        previous = self.remove(name)
        self._broken[as_text(name)] = error
        return previous

    def remove(self, name: str) -> AdapterHandle | None:
        """Remove a name; return the version that it referred to, or None."""
        self._changed = True
        self._broken.pop(as_text(name), None)
        return self._current.pop(as_text(name), None)

    def __contains__(self, name: str) -> bool:
        """Return whether the name refers to a version that requests can use."""
        return as_text(name) in self._current

    def is_current(self, handle: AdapterHandle) -> bool:
        """Return whether the handle's name still refers to this version."""
        return self._current.get(as_text(handle.name)) is handle

    def publish(self) -> None:
        """Make all changes visible to other threads."""
        if self._changed:
            self.table = NameTable(
                MappingProxyType(dict(self._current)), MappingProxyType(dict(self._broken))
            )
            self._changed = False

"""The adapters of a server: names, slots, and their weights by slot, packed for the operator.

Every adapter is loaded at start and stays. One that does not load is remembered with its reason
and is an error for its own requests alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import LoraPair
from vlora.errors import InvalidArgument, NotFound, nearest
from vlora.lora.adapter import (
    MAX_ADAPTER_BYTES,
    Adapter,
    AdapterInfo,
    ModelShape,
    Place,
    load_adapter,
)
from vlora.lora.peft_config import Refusal, as_text
from vlora.lora.segments import BASE

log = logging.getLogger(__name__)

MAX_NAMES_IN_ERROR = 20


class AdapterStore:
    """Owns the packed weights; a slot is an adapter's index in every group."""

    def __init__(
        self,
        model: ModelShape,
        max_bytes: int = MAX_ADAPTER_BYTES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """max_bytes: what one adapter's weights may need in fp32. dtype: in which the operator gets
        them; an adapter's own pairs stay fp32, as merging needs them."""
        self._dtype = dtype
        self._model = model
        self._max_bytes = max_bytes
        self._adapters: list[Adapter] = []
        self._slots: dict[str, int] = {}
        self._broken: dict[str, InvalidArgument] = {}
        self._groups: dict[tuple[Place, ...], LoraGroup] = {}
        self.heads = HeadGroup(model.hidden)
        """Vision task heads by slot."""
        self.places: set[Place] = set()
        """Matrices that any known adapter changes."""

    def load(self, folders: Mapping[str, Path]) -> None:
        """Load each named folder, in order of name. Whatever fails while one is loaded is that
        adapter's error alone."""
        for name, folder in sorted(folders.items()):
            try:
                self._add(load_adapter(name, folder, self._model, self._max_bytes))
            except InvalidArgument as error:
                self._refuse(name, error)
            except Exception as error:
                log.exception("while an adapter was loaded")
                self._refuse(name, Refusal(name, str(folder))(f"does not load: {error!r}"))

    def _refuse(self, name: str, error: InvalidArgument) -> None:
        log.warning("%s", error)
        self._broken[as_text(name)] = error

    def _add(self, adapter: Adapter) -> None:
        self._slots[adapter.info.name] = len(self._adapters)
        self._adapters.append(adapter)
        self.places.update(adapter.pairs)
        self.heads.append(adapter.head.linear if adapter.head else None)
        for places, group in self._groups.items():
            group.append([self._pair(adapter, place) for place in places])

    def _pair(self, adapter: Adapter, place: Place) -> LoraPair | None:
        pair = adapter.pairs.get(place)
        return pair and LoraPair(pair.a.to(self._dtype), pair.b.to(self._dtype))

    def group(self, places: Sequence[Place]) -> LoraGroup:
        """Pairs of matrices that share their input; the group grows as adapters are added."""
        key = tuple(places)
        if key not in self._groups:
            shapes = [self._model.shape_of(place) for place in key]
            group = LoraGroup(shapes[0][1], [d_out for d_out, _ in shapes], self._dtype)
            for adapter in self._adapters:
                group.append([self._pair(adapter, place) for place in key])
            self._groups[key] = group
        return self._groups[key]

    def names(self) -> tuple[str, ...]:
        """Names of the adapters that can be asked for."""
        return tuple(self._slots)

    @property
    def broken(self) -> Mapping[str, InvalidArgument]:
        """Adapters that exist but do not load, with the reason."""
        return self._broken

    def info(self, name: str) -> AdapterInfo:
        """Raises NotFound (lists the known), or InvalidArgument for one that does not load."""
        return self.adapter(self.slot(name)).info

    def slot(self, name: str | None) -> int:
        """Slot of an adapter, `BASE` for None. Raises as `info`."""
        if name is None:
            return BASE
        if name in self._broken:
            raise self._broken[name]
        if name not in self._slots:
            raise NotFound(f"unknown adapter '{name}'{self._known(name)}")
        return self._slots[name]

    def adapter(self, slot: int) -> Adapter:
        return self._adapters[slot]

    def _known(self, unknown: str) -> str:
        """The end of the sentence about an unknown name: the nearest, and all known."""
        names = list(self._slots)
        if not names:
            return " (no adapter is loaded)"
        more = len(names) - MAX_NAMES_IN_ERROR
        tail = f" and {more} more" if more > 0 else ""
        known = ", ".join(names[:MAX_NAMES_IN_ERROR])
        return f"{nearest(unknown, names) or '.'} Known: {known}{tail}"


def find_folders(root: Path | None, names: Mapping[str, str]) -> dict[str, Path]:
    """Name → folder: every folder under `root` under its own name, and those of `names`.

    names: as in the vLLM backend's `multi_lora.json`, name → folder relative to the root. The
    file wins over a folder of the same name; a clash is logged. Relative folders need a root.
    """
    folders: dict[str, Path] = {}
    if root is not None:
        if not root.is_dir():
            raise InvalidArgument(f"the adapter root {root} is not a folder")
        try:
            entries = sorted(root.iterdir())
        except OSError as error:
            raise InvalidArgument(f"the adapter root {root} cannot be read: {error}") from error
        folders = {
            entry.name: entry
            for entry in entries
            if _may_be_adapter(entry) and not entry.name.startswith(".")
        }
    for name, folder in names.items():
        path = Path(folder) if root is None else root / folder
        if name in folders and not _same(folders[name], path):
            told = map(as_text, (name, str(path), str(folders[name])))
            log.warning("adapter '%s' is %s by the file, not %s", *told)
        folders[name] = path
    return folders


def _may_be_adapter(entry: Path) -> bool:
    """A folder, or a link that leads nowhere: that is an adapter that does not load."""
    try:
        return entry.is_dir() or (entry.is_symlink() and not entry.exists())
    except OSError:
        return True


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False

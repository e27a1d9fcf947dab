"""Adapters of the vision tower and the connector, as the encoder's process reads them.

The encoder's process watches the adapter folders, independently of the engine's. It checks an
adapter's files when a request with images first names it, and caches the weights of the most
recently used ones. It does not read the parts that change the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache

from vlora.adapters.catalog import EMPTY, FolderWatch, stamp_of
from vlora.adapters.errors import ErrorFactory, as_adapter_error, as_text, is_transient
from vlora.adapters.files import WEIGHTS, describe_adapter
from vlora.adapters.handle import Stamp, version_of
from vlora.adapters.model_shape import ModelShape, vision_path
from vlora.adapters.tensors import WeightsReader
from vlora.atmm.types import LoraPair
from vlora.errors import AdapterChanging, InvalidArgument


@dataclass(frozen=True, eq=False)
class VisionPart:
    """Changes that an adapter makes to the vision tower and the connector.

    digest: SHA-256 of the weights.
    version: version of the adapter's folder (see `version_of`).
    pairs: A and B of each linear layer that it changes, by its `vision_path`.
    """

    digest: str
    version: str
    pairs: Mapping[str, LoraPair]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the weights."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


@dataclass(frozen=True)
class _Described:
    """Result of checking the files of an adapter.

    stamp: fingerprint of the checked files. If the folder's differs, the result is out of date.
    reader: reads the vision part; None if the adapter has none.
    error: reason why the adapter cannot be used, or None.
    """

    stamp: Stamp
    reader: WeightsReader | None = None
    error: InvalidArgument | None = None


class VisionAdapters:
    """LRU cache of the vision parts of adapters, by name. Only one thread may call `part`.

    find: returns the present folders by name.
    max_bytes: maximum size of one adapter's weights in fp32.
    budget: maximum number of bytes of the cached vision parts; None for no limit.
    layers: linear layers of the tower and the connector, which adapters may change.
    """

    def __init__(
        self,
        model: ModelShape,
        find: Callable[[], Mapping[str, Path]],
        max_bytes: int,
        budget: int | None,
        layers: Collection[str],
    ) -> None:
        self._model = model
        self._layers = layers
        self._max_bytes = max_bytes
        self._described: dict[str, _Described] = {}
        size = float("inf") if budget is None else budget
        self._parts: LRUCache[str, VisionPart] = LRUCache(size, lambda part: part.nbytes)
        found = {name: (folder, stamp_of(folder)) for name, folder in find().items()}
        present = {name: one for name, one in found.items() if one[1] != EMPTY}
        self._folders: Mapping[str, tuple[Path, Stamp]] = {}
        self._update(present)
        self._watch = FolderWatch(find, self._update)
        self._watch.start(present)

    def close(self) -> None:
        """Stop watching the folders."""
        self._watch.close()

    def part(self, name: str | None) -> VisionPart | None:
        """Return the vision part of an adapter's present version.

        Returns None for the base model, without a vision part, and for an unknown name, which `lmm`
        refuses. Raises InvalidArgument for an adapter that cannot be loaded, and AdapterChanging if
        its folder is being changed at the moment.
        """
        found = None if name is None else self._folders.get(name)
        if name is None or found is None:
            return None
        folder, stamp = found
        described = self._described.get(name)
        if described is None or described.stamp != stamp:
            described = self._described[name] = self._describe(name, folder, stamp)
        if described.error is not None:
            raise described.error.copy()
        if described.reader is None:
            return None
        part = self._parts.get(name)
        if part is None or part.version != version_of(stamp):
            self._parts.pop(name, None)
            part = self._read(name, folder, stamp, described.reader)
            if part.nbytes <= self._parts.maxsize:
                self._parts[name] = part
        return part

    def _update(self, folders: Mapping[str, tuple[Path, Stamp]]) -> None:
        self._folders = {as_text(name): found for name, found in folders.items()}

    def _describe(self, name: str, folder: Path, stamp: Stamp) -> _Described:
        """Check the files of an adapter, and return the result, also errors in the files.

        Other errors are raised, so that the next request tries again; AdapterChanging if the files
        are no longer those of the stamp, which they may be again later.
        """
        for gone in self._described.keys() - self._folders.keys():
            del self._described[gone]
            self._parts.pop(gone, None)
        with _unchanged(name, folder, stamp):
            try:
                description = describe_adapter(name, folder, self._model, self._max_bytes)
                self._check_layers(name, description.vision)
            except BaseException as failure:  # A panic of a Rust library is not an Exception.
                error = as_adapter_error(name, folder, failure)
                if is_transient(failure):
                    raise error from failure
                return _Described(stamp, error=error.copy())
            return _Described(stamp, description.vision)

    def _check_layers(self, name: str, reader: WeightsReader | None) -> None:
        """Raise InvalidArgument if an adapter changes a matrix that is not a linear layer.

        A checkpoint may store matrices by which the tower does not multiply.
        """
        changed = set() if reader is None else {path for _, path in reader.ranks}
        if unknown := changed - set(self._layers):
            raise ErrorFactory(name, WEIGHTS)(
                f"changes '{min(unknown)}', which is not a linear layer of this model's vision"
                " tower or connector"
            )

    @staticmethod
    def _read(name: str, folder: Path, stamp: Stamp, reader: WeightsReader) -> VisionPart:
        with _unchanged(name, folder, stamp):
            pairs, digest = reader.read(folder / WEIGHTS, ErrorFactory(name, WEIGHTS))
        by_path = {path: pair for (_, path), pair in pairs.items()}
        return VisionPart(digest, version_of(stamp), by_path)


@contextmanager
def _unchanged(name: str, folder: Path, stamp: Stamp) -> Iterator[None]:
    """Raise AdapterChanging if a folder's files differ from the stamp at the end of the context.

    This replaces any error within the context, which may be due to the change.
    """
    try:
        yield
    finally:
        if stamp_of(folder) != stamp:
            raise AdapterChanging(f"adapter '{name}' is being changed; send the request again")


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of a vision tower and its connector, by their `vision_path`."""
    paths = {vision_path(name): module for name, module in model.named_modules()}
    return {
        path: module
        for path, module in paths.items()
        if path is not None and isinstance(module, torch.nn.Linear)
    }


@contextmanager
def applied(layers: Mapping[str, torch.nn.Linear], pairs: Mapping[str, LoraPair]) -> Iterator[None]:
    """Make linear layers return W x + B A x within the context.

    pairs: A and B by path. Each path must be among the layers.
    """
    hooks = [layers[path].register_forward_hook(_adding(pair)) for path, pair in pairs.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adding(pair: LoraPair) -> Callable[..., torch.Tensor]:
    """Return a forward hook that adds B A x to the output of a layer."""

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        return y + linear(linear(inputs[0], pair.a), pair.b)

    return hook

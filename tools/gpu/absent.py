"""Placeholders for missing packages, so that modules which import the packages can be loaded.

The decoder's modules import some packages only to read checkpoints and adapters. A step of a random
model uses none of these packages, so it can run on a machine that lacks them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

UNUSED = ("regex", "safetensors", "tokenizers", "transformers")
"""Packages that the decoder's modules import, but that no step uses."""


class _AnyAttribute(type):
    """Metaclass of `Absent`: every attribute of the class is `Absent` itself."""

    def __getattr__(cls, name: str) -> type[Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(Exception, metaclass=_AnyAttribute):
    """Placeholder for every name of a missing package.

    It can be a base class, be called when a module is imported, and be caught.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments)


class _Finder(MetaPathFinder, Loader):
    """Import finder that supplies an empty module for each module of some packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """Module in which every public name is `Absent`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


def replace_absent(packages: Sequence[str] = UNUSED) -> list[str]:
    """Make placeholders importable for those of `packages` that this Python lacks; return their
    names.
    """
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        sys.meta_path.append(_Finder(absent))
    return absent

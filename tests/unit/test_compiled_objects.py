"""Tests of the objects that a build of the compiled core uses again (csrc/objects.py)."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "objects.py"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a compiled object that depends on a.cpp and a.h."""
    spec = importlib.util.spec_from_file_location("objects_of_csrc", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name in ("a.cpp", "a.h"):
        (tmp_path / name).write_text("int a;")
        os.utime(tmp_path / name, (1, 1))
    one = module.Object(tmp_path / "a.o", ["g++", "-O3", "-c", str(tmp_path / "a.cpp")])
    assert not one.is_current()
    one.compile(lambda command: write(one, command))
    return one


def write(one: Any, command: list[str]) -> None:
    """Do what a compiler does: write the object and the file of its dependencies."""
    assert command[: len(one.command)] == one.command
    assert command[command.index("-MF") + 1] == str(one.rule)
    folder = one.path.parent
    one.rule.write_text(f"{one.path}: {folder / 'a.cpp'} \\\n {folder / 'a.h'}\n")
    one.path.write_bytes(b"object")


def test_an_object_is_current_after_its_compilation(compiled: Any) -> None:
    assert compiled.is_current()


@pytest.mark.parametrize("name", ["a.cpp", "a.h"])
def test_an_object_whose_source_has_changed_is_compiled_again(compiled: Any, name: str) -> None:
    later = compiled.path.stat().st_mtime + 1
    os.utime(compiled.path.parent / name, (later, later))
    assert not compiled.is_current()


@pytest.mark.parametrize("name", ["a.h", "a.o", "a.d"])
def test_an_object_that_lacks_a_file_is_compiled_again(compiled: Any, name: str) -> None:
    (compiled.path.parent / name).unlink()
    assert not compiled.is_current()


def test_an_object_of_another_command_is_compiled_again(compiled: Any) -> None:
    assert not replace(compiled, command=["g++", "-O2", *compiled.command[2:]]).is_current()


def test_an_object_whose_compilation_was_interrupted_is_compiled_again(compiled: Any) -> None:
    def interrupt(command: list[str]) -> None:
        write(compiled, command)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled.compile(interrupt)
    assert compiled.path.exists()
    assert not compiled.is_current()

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


def test_an_object_is_current_until_its_source_files_or_command_change(compiled: Any) -> None:
    assert compiled.is_current()
    assert not replace(compiled, command=["g++", "-O2", *compiled.command[2:]]).is_current()
    later = compiled.path.stat().st_mtime + 1
    for name in ("a.cpp", "a.h"):
        source = compiled.path.parent / name
        os.utime(source, (later, later))
        assert not compiled.is_current()
        os.utime(source, (1, 1))
    for name in ("a.h", "a.o", "a.d"):
        file = compiled.path.parent / name
        file.rename(compiled.path.parent / "away")
        assert not compiled.is_current()
        (compiled.path.parent / "away").rename(file)
    assert compiled.is_current()


def test_an_object_whose_compilation_was_interrupted_is_compiled_again(compiled: Any) -> None:
    def interrupt(command: list[str]) -> None:
        write(compiled, command)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled.compile(interrupt)
    assert compiled.path.exists()
    assert not compiled.is_current()

"""Tests that the preflight names what is missing, and the command that installs it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "preflight"


@pytest.fixture
def preflight(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("preflight", str(SCRIPT))
    spec = importlib.util.spec_from_loader("preflight", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_it_needs_only_a_bare_python() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_missing_requirement_stops_the_set_up(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "ABOVE", (3, 0))
    assert preflight.main() == 1
    said = capsys.readouterr().err
    assert "it must be 3.11 or 3.12" in said
    assert "fix: choose another one: make PYTHON=python3.11" in said


def test_a_missing_library_is_reported_with_its_package(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.sysconfig, "get_config_var", lambda name: "/nowhere.so")
    what, fix = preflight.check_libpython()
    assert "Triton's Python backend needs it" in what
    assert fix.startswith("apt-get install libpython3.")


def test_a_missing_compiler_is_only_a_warning(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    assert preflight.main() == 0
    said = capsys.readouterr().err
    assert "warning: no C++ compiler" in said
    assert "fix: apt-get install g++" in said


@pytest.mark.parametrize(("address", "is_free"), [("0.0.0.0", False), ("127.0.0.2", True)])
def test_a_port_is_taken_only_on_the_address_of_the_server(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, address: str, is_free: bool
) -> None:
    with socket.socket() as holder:
        holder.bind((address, 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setattr(preflight, "PORTS", (port,))
        problem = preflight.check_ports()
    assert (problem is None) == is_free
    if problem is not None:
        what, fix = problem
        assert str(port) in what
        assert "--http-port" in fix

"""Tests of `vlora serve` with a `tritonserver` on PATH, as in NVIDIA's container."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import psutil
import pytest

from tests.support.triton_client import asking
from vlora.launcher.assembly import assemble
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script on PATH that runs the wheel's server as the container's `tritonserver`."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    wheel = assemble(tmp_path)
    libraries = wheel.environment["LD_LIBRARY_PATH"]
    script = tmp_path / "bin" / "tritonserver"
    script.parent.mkdir()
    # The container's server finds its backends and libraries by itself.
    script.write_text(
        f"#!/bin/sh\nexport LD_LIBRARY_PATH={shlex.quote(libraries)}\n"
        f'exec {shlex.join([str(wheel.binary), *wheel.arguments])} "$@"\n'
    )
    script.chmod(0o755)
    return script


def test_the_server_on_path_is_started_with_its_own_backends(
    on_path: Path, checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    assembly = assemble(tmp_path / "unused")
    assert (assembly.binary, assembly.arguments) == (on_path, ())
    assert "LD_LIBRARY_PATH" not in assembly.environment
    log = tmp_path / "server.log"
    options = ServerOptions(model=checkpoint, adapters=adapters_dir, log=log)
    with TritonServer(options) as running, asking(running) as ask:
        (served,) = (
            process
            for process in psutil.Process().children(recursive=True)
            if f"--backend-directory={tmp_path / 'backends'}" in process.cmdline()
        )
        assert served.exe() != str(on_path)
        (answer,) = ask.stream("lmm", text_input="hello", sampling_parameters='{"max_tokens": 2}')
        assert answer["text_output"], running.explain()

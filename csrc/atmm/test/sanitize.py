"""Builds the checks with address and undefined-behaviour sanitizers, and runs them.

    python csrc/atmm/test/sanitize.py [build folder] [rounds]

Exit status 0: clean, and nothing leaks. Needs g++ with its sanitizer libraries, no Python module.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CORE / "cpu"))

import generate  # noqa: E402  # lies beside the kernels, outside any package

FLAGS = ["-std=c++17", "-O1", "-g1", "-fno-strict-aliasing", "-ffp-contract=off", "-w"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def build(folder: Path) -> Path:
    """The program; objects newer than all sources are kept."""
    compiler = os.environ.get("CXX", "g++")
    units = generate.write(folder)
    units += [(path, ()) for path in sorted((CORE / "cpu").glob("*.cpp"))]
    units += [(CORE / "test" / "check.cpp", ())]
    sources = [path for path in CORE.rglob("*") if path.suffix in (".h", ".cpp", ".py")]
    newest = max(path.stat().st_mtime for path in sources)

    def compile_unit(unit: tuple[Path, tuple[str, ...]]) -> str:
        source, flags = unit
        target = folder / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < newest:
            include = [f"-I{CORE / 'include'}", f"-I{CORE / 'cpu'}", f"-I{folder}"]
            subprocess.run(
                [compiler, *FLAGS, *SANITIZE, *flags, *include, "-c", source, "-o", target],
                check=True,
            )
        return str(target)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        objects = list(pool.map(compile_unit, units))
    program = folder / "check"
    subprocess.run([compiler, *SANITIZE, *objects, "-ldl", "-lpthread", "-o", program], check=True)
    return program


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else CORE.parents[1] / "build" / "sanitize")
    program = build(folder)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    subprocess.run([program, *sys.argv[2:3]], check=True, env=environment)


if __name__ == "__main__":
    main()

"""Build the kernel checks with sanitizers and run them.

    python csrc/atmm/test/sanitize.py [--build FOLDER] [--rounds N] [--only memory|threads]
                                    [--without-lines]

memory: the address, leak and undefined-behaviour sanitizers, on our own threads and on OpenMP's.
threads: the thread sanitizer, on our own threads only, because this sanitizer cannot follow how
OpenMP's runtime passes work between threads.

The exit status is 0 if no sanitizer reports an error. g++ and its sanitizer libraries are required.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CSRC))

import kernels  # noqa: E402  # csrc is not a package

FLAGS = ["-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-w"]
FLAGS += [kernels.REDUCED_TILES_FLAG]
CHECKED = ["-O1"]
UNCHECKED = ["-O0"]
"""Flags of units that this CPU cannot run. They are only linked, so they need no optimisation."""
CPU_FLAGS = {
    "-mavx512bf16": "avx512_bf16",
    "-mavx512vnni": "avx512_vnni",
    "-mamx-tile": "amx_tile",
    "-mamx-bf16": "amx_bf16",
}
"""Names in /proc/cpuinfo by compiler flag. The name of any other flag is the flag without `-m`."""
SANITIZERS = {
    "memory": [
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        # Check addresses by calls. Inline checks take g++ almost twice as long to compile.
        *("--param", "asan-instrumentation-with-call-threshold=0"),
    ],
    "threads": ["-fsanitize=thread"],
}
RUNS = {"memory": ("own", "openmp"), "threads": ("own",)}


def runs_here(unit: kernels.Unit) -> bool:
    """Return whether this CPU has the instruction sets that the unit is compiled for."""
    available = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    names = {CPU_FLAGS.get(flag, flag.removeprefix("-m")) for flag in unit.flags}
    return available is not None and names <= set(available[1].split())


def build(folder: Path, sanitize: list[str], lines: str) -> Path:
    """Build the program, reuse objects newer than all sources, and return the program's path.

    lines: compiler flag of the line numbers in reports, -g0 or -g1.
    """
    compiler = os.environ.get("CXX", "g++")
    kernels.REDUCED_TILES = True
    units = [
        *kernels.units(folder),
        *(kernels.Unit(path) for path in sorted((CSRC / "atmm" / "test").glob("*.cpp"))),
    ]
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".py")]
    newest = max(path.stat().st_mtime for path in sources)
    include = [f"-I{path}" for path in (*kernels.INCLUDE, folder)]

    def compile_unit(unit: kernels.Unit) -> str:
        target = folder / kernels.object_name(unit)
        if not target.exists() or target.stat().st_mtime < newest:
            checks = [*CHECKED, lines, *sanitize] if runs_here(unit) else UNCHECKED
            command = [compiler, *FLAGS, *checks, *unit.flags, *include]
            subprocess.run([*command, "-c", unit.source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        objects = dict(zip(units, pool.map(compile_unit, units), strict=True))
    program = folder / "check"
    libraries = ["-ldl", "-lpthread", "-Wl,--no-as-needed", "-lgomp"]
    linked = [objects[unit] for unit in kernels.link_order(units)]
    subprocess.run([compiler, *sanitize, *linked, *libraries, "-o", program], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--build",
        type=Path,
        default=CSRC.parent / "build" / "sanitize",
        metavar="FOLDER",
        help="folder of the objects and programs (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        default="200",
        metavar="N",
        help="rounds of random checks (default: %(default)s)",
    )
    parser.add_argument("--only", choices=SANITIZERS, help="run only one of the two kinds")
    parser.add_argument(
        "--without-lines",
        action="store_true",
        help="shorten the compilation; reports then have no line numbers",
    )
    options = parser.parse_args()
    lines, suffix = ("-g0", "-without-lines") if options.without_lines else ("-g1", "")
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    for name in [options.only] if options.only else SANITIZERS:
        program = build(options.build / f"{name}{suffix}", SANITIZERS[name], lines)
        for threads in RUNS[name]:
            subprocess.run([program, options.rounds, threads], check=True, env=environment)
            print(f"{name}: no errors on {threads} threads", flush=True)


if __name__ == "__main__":
    main()

"""Compile ATMM for CUDA: generate one source per tile instance, run nvcc, and link a library.

`python -m csrc.atmm.cuda.build [--limit N]` (`make cuda`) needs nvcc and the CUTLASS
headers (PyPI `nvidia-cutlass`, downloaded into the build directory), but no GPU. RESOURCES next to
the library holds the registers and shared memory of each kernel as reported by ptxas. With
`--emulate` a C++ compiler builds the same kernels for the host (csrc/atmm/cuda/host). The script
uses only the standard library.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from csrc.atmm.cuda.tiles import KINDS, CudaTile, tiles

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
SOURCES = CSRC / "atmm" / "cuda"
INCLUDES = (f"-I{CSRC / 'atmm' / 'include'}", f"-I{CSRC}")
BUILD = ROOT / "build" / "cuda"
LIBRARY = BUILD / "libvlora_atmm_cuda.so"
RESOURCES = "resources.json"
EMULATED = ROOT / "build" / "cuda-host" / "libvlora_atmm_emulated.so"
CUTLASS = "nvidia-cutlass==4.2.0.0"
HEADERS = Path("cutlass_library") / "source" / "include"
# Folder into which `--headers` copies CUTLASS headers, for a machine without a network.
CARRIED = ROOT / "build" / "cutlass"
ARCHITECTURES = (80, 90)
TYPES = {"fp16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}
FLAGS = (
    *("-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr"),
    *("-Xcompiler", "-fPIC", "-cudart", "static", "-Xptxas", "-v"),
)
HOST_FLAGS = ("-std=c++17", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas")


class BuildError(RuntimeError):
    """Error of the build: a missing part, or the compiler's output."""


class NoToolchain(BuildError):
    """Raised if this machine lacks a compiler or headers."""


@dataclass(frozen=True)
class Instance:
    """A kernel to compile: a tile for one product ("shrink" or "expand") and one type."""

    tile: CudaTile
    kind: str
    dtype: str

    @property
    def name(self) -> str:
        block, warp = ("x".join(map(str, shape)) for shape in (self.tile.block, self.tile.warp))
        return f"{self.kind}_{self.dtype}_{block}_{warp}_{self.tile.stages}"

    @property
    def source(self) -> str:
        element, expand = TYPES[self.dtype], "true" if self.kind == "expand" else "false"
        return (
            '#include "grouped.cuh"\n'
            f"vlora::Instance make_{self.name}() {{\n"
            f"  return vlora::Grouped<{element}, {expand}, {self.tile.arguments()}>::instance();\n"
            "}\n"
        )


def instances(limit: int | None = None, dtypes: tuple[str, ...] = tuple(TYPES)) -> list[Instance]:
    """Return all instances, or at most `limit` of them, spread evenly over kinds and types."""
    known = {kind: tiles(kind) for kind in KINDS}
    return [
        Instance(known[kind][i], kind, dtype)
        for i in range(max(map(len, known.values())))
        for dtype in dtypes
        for kind in KINDS
        if i < len(known[kind])
    ][:limit]


def registry(chosen: list[Instance]) -> str:
    """Return the source that lists the instances for api.cu in order."""
    declared = "".join(f"vlora::Instance make_{one.name}();\n" for one in chosen)
    listed = ", ".join(f"make_{one.name}()" for one in chosen)
    return (
        '#include "grouped.cuh"\n'
        f"{declared}"
        "namespace vlora {\n"
        f"static const Instance kTable[] = {{{listed}}};\n"
        "extern const Instance *const kInstances;\nextern const int kInstanceCount;\n"
        "const Instance *const kInstances = kTable;\n"
        f"const int kInstanceCount = {len(chosen)};\n"
        "}  // namespace vlora\n"
    )


def find_nvcc() -> str:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise NoToolchain("nvcc is missing; install the CUDA toolkit to build ATMM for CUDA")
    return nvcc


def find_headers(folder: Path = BUILD, *, fetch: bool = True) -> Path:
    """Return CUTLASS's include folder.

    It is $VLORA_CUTLASS, the folder of `--headers`, or a download from PyPI.
    """
    given = os.environ.get("VLORA_CUTLASS")
    places = [Path(given)] if given else [CARRIED, folder / "cutlass" / HEADERS]
    for headers in places:
        if (headers / "cutlass" / "cutlass.h").is_file():
            return headers
    if given or not fetch:
        raise NoToolchain(
            f"CUTLASS headers are missing in {', '.join(map(str, places))} (VLORA_CUTLASS)"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    _run([*command, "--target", str(folder / "cutlass"), CUTLASS])
    return places[-1]


def gencode(architectures: tuple[int, ...]) -> list[str]:
    """Return nvcc's flags for machine code of each architecture and for PTX of the newest one."""
    *older, newest = sorted(architectures)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in older]
    return [*codes, f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]"]


def _common(headers: Path) -> list[str]:
    return [find_nvcc(), *FLAGS, f"-I{headers}", f"-I{SOURCES}", *INCLUDES]


def build(
    chosen: list[Instance],
    folder: Path = BUILD,
    jobs: int | None = None,
    architectures: tuple[int, ...] = ARCHITECTURES,
    *,
    fetch: bool = True,
) -> Path:
    """Compile the changed sources, link them, and return the library's path."""
    codes = gencode(architectures)
    common = [*_common(find_headers(folder, fetch=fetch)), *codes]
    units = sorted(SOURCES.glob("*.cu"))
    for name, text in {one.name: one.source for one in chosen}.items():
        units.append(_write(folder / "generated" / f"{name}.cu", text))
    units.append(_write(folder / "generated" / "registry.cu", registry(chosen)))
    stamp = _write(folder / "objects" / "command", " ".join(common))

    def compiled(unit: Path) -> Path:
        target = folder / "objects" / f"{unit.stem}.o"
        if _stale(target, [unit, stamp]):
            started = time.monotonic()
            said = _run([*common, "-c", str(unit), "-o", str(target)])
            target.with_suffix(".ptxas").write_text(said)
            print(f"{unit.stem}  {time.monotonic() - started:.0f} s", flush=True)
        return target

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    library = folder / LIBRARY.name
    _link([common[0], "-shared", "-cudart", "static", *codes], objects, library)
    found = [one for o in objects for one in resources(o.stem, o.with_suffix(".ptxas").read_text())]
    (folder / RESOURCES).write_text(json.dumps(found, indent=1) + "\n")
    return library


_KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def resources(unit: str, text: str) -> list[dict[str, int | str]]:
    """Return the registers and memory of every kernel of a translation unit, by ptxas's report."""
    found: list[dict[str, int | str]] = []
    for line in text.splitlines():
        if match := _KERNEL.search(line):
            found.append({"unit": unit, "kernel": match[1], "sm": int(match[2]), "shared": 0})
        elif found and (match := _SPILLS.search(line)):
            stack, stores, loads = map(int, match.groups())
            found[-1] |= {"stack": stack, "spill_stores": stores, "spill_loads": loads}
        elif found and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found[-1] |= {"registers": int(match[1]), "shared": int(shared[1]) if shared else 0}
    return found


def emulate(target: Path = EMULATED) -> Path:
    """Compile the emulation if a source changed, and return its path.

    Another process that compiles it meanwhile, such as another worker of the tests, is waited for.
    Raises NoToolchain without a C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoToolchain("the emulation needs a C++ compiler; install g++")
    units = sorted([*SOURCES.glob("*.cu"), *(SOURCES / "host").glob("*.cu")])

    def compiled(unit: Path) -> Path:
        to = target.parent / f"{unit.stem}.o"
        if _stale(to, [unit]):
            _run([compiler, "-x", "c++", *HOST_FLAGS, *INCLUDES, "-c", str(unit), "-o", str(to)])
        return to

    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _link([compiler, "-shared"], list(pool.map(compiled, units)), target)
    return target


def carry_headers(folder: Path) -> int:
    """Copy the CUTLASS headers that an instance includes. Return the number of headers."""
    headers = find_headers()
    unit = _write(BUILD / "generated" / f"{instances(1)[0].name}.cu", instances(1)[0].source)
    said = _run([*_common(headers), *gencode(ARCHITECTURES[-1:]), "-M", str(unit)])
    found = {Path(word).resolve() for word in said.replace("\\\n", " ").split()}
    kept = [path for path in found if path.is_relative_to(headers.resolve())]
    for path in [*kept, headers.resolve() / "cutlass" / "cutlass.h"]:
        to = folder / path.relative_to(headers.resolve())
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
    return len(kept)


def _stale(target: Path, sources: list[Path]) -> bool:
    if not target.exists():
        return True
    headers = [*SOURCES.rglob("*.*h"), *(CSRC / "atmm" / "include").rglob("*.h")]
    return target.stat().st_mtime < max(p.stat().st_mtime for p in [*sources, *headers])


def _link(command: list[str], objects: list[Path], library: Path) -> None:
    """Link the objects if one is newer than the library.

    A process may have the library open, so it is linked under a temporary name and then renamed.
    """
    draft = library.with_suffix(f".{os.getpid()}")
    if not library.exists() or any(o.stat().st_mtime > library.stat().st_mtime for o in objects):
        _run([*command, *map(str, objects), "-o", str(draft)])
        draft.replace(library)


def _write(path: Path, text: str) -> Path:
    """Write a file, unless it has this text already and need not be compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m csrc.atmm.cuda.build",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="compile at most this many instances"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compilers to run at once (default: one per core)"
    )
    parser.add_argument(
        "--sm",
        type=int,
        nargs="+",
        default=ARCHITECTURES,
        metavar="ARCHITECTURE",
        help="architectures (default: 80 90)",
    )
    parser.add_argument("--list", action="store_true", help="only list the instances")
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="build the emulation for the host with a C++ compiler",
    )
    parser.add_argument(
        "--headers",
        type=Path,
        nargs="?",
        const=CARRIED,
        metavar="FOLDER",
        help="copy the CUTLASS headers that the build needs",
    )
    given = parser.parse_args()
    chosen = instances(given.limit)
    try:
        if given.list:
            print("\n".join(one.name for one in chosen))
        elif given.emulate:
            print(emulate())
        elif given.headers:
            print(f"{carry_headers(given.headers)} headers in {given.headers}")
        else:
            print(build(chosen, jobs=given.jobs, architectures=tuple(given.sm)))
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

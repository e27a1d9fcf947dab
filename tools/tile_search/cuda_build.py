"""Compiles ATMM for CUDA: generates one source per tile instance, runs nvcc, links one library.

`python -m tools.tile_search.cuda_build [--limit N]` (`make cuda`). Needs nvcc and the CUTLASS
headers (PyPI `nvidia-cutlass`, fetched into the build directory), no GPU; nothing of vlora needs
the result to be installed or to run on a CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.tile_search.cuda_tiles import KINDS, CudaTile, tiles

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "atmm" / "cuda"
BUILD = ROOT / "build" / "cuda"
LIBRARY = BUILD / "libvlora_atmm_cuda.so"
CUTLASS = "nvidia-cutlass==4.2.0.0"
HEADERS = Path("cutlass_library") / "source" / "include"
ARCHITECTURES = (80, 90)
TYPES = {"fp16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}
FLAGS = (
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xcompiler",
    "-fPIC",
    "-cudart",
    "static",
)


class BuildError(RuntimeError):
    """What is missing, or what the compiler said."""


@dataclass(frozen=True)
class Instance:
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
    """All of them, or the first `limit`, shared out evenly among kinds and types."""
    rounds = max(len(tiles(kind)) for kind in KINDS)
    found = [
        Instance(tiles(kind)[i], kind, dtype)
        for i in range(rounds)
        for dtype in dtypes
        for kind in KINDS
        if i < len(tiles(kind))
    ]
    return found[:limit]


def registry(chosen: list[Instance]) -> str:
    """The source that lists the instances for api.cu, in their order."""
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
        raise BuildError("nvcc is not here; ATMM for CUDA is built only where the CUDA toolkit is")
    return nvcc


def find_headers(folder: Path = BUILD, *, fetch: bool = True) -> Path:
    """CUTLASS's include folder: $VLORA_CUTLASS, or from PyPI under the build directory."""
    given = os.environ.get("VLORA_CUTLASS")
    headers = Path(given) if given else folder / "cutlass" / HEADERS
    if not (headers / "cutlass" / "cutlass.h").is_file():
        if given or not fetch:
            raise BuildError(f"no CUTLASS headers in {headers}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        _run([*command, "--target", str(folder / "cutlass"), CUTLASS])
    return headers


def build(
    chosen: list[Instance],
    folder: Path = BUILD,
    jobs: int | None = None,
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> Path:
    """Compile what changed and link; returns the library."""
    nvcc, headers = find_nvcc(), find_headers(folder)
    folder.mkdir(parents=True, exist_ok=True)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    common = [nvcc, *FLAGS, *codes, f"-I{headers}", f"-I{SOURCES}"]
    units = sorted(SOURCES.glob("*.cu"))
    for name, text in {one.name: one.source for one in chosen}.items():
        units.append(_write(folder / "generated" / f"{name}.cu", text))
    units.append(_write(folder / "generated" / "registry.cu", registry(chosen)))
    changed = max(header.stat().st_mtime for header in SOURCES.glob("*.*h"))

    def compiled(unit: Path) -> Path:
        target = folder / "objects" / f"{unit.stem}.o"
        target.parent.mkdir(exist_ok=True)
        if not target.exists() or target.stat().st_mtime < max(unit.stat().st_mtime, changed):
            started = time.monotonic()
            _run([*common, "-c", str(unit), "-o", str(target)])
            print(f"{unit.stem}  {time.monotonic() - started:.0f} s", flush=True)
        return target

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    library = folder / LIBRARY.name
    _run([nvcc, "-shared", "-cudart", "static", *codes, *map(str, objects), "-o", str(library)])
    return library


def _write(path: Path, text: str) -> Path:
    """Leaves an unchanged file alone, so that it is not compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", type=int, help="compile only so many instances (CI: at most 10)")
    parser.add_argument("--jobs", type=int, help="compilers at once; default: one a core")
    parser.add_argument("--list", action="store_true", help="only name the instances")
    given = parser.parse_args()
    chosen = instances(given.limit)
    if given.list:
        print("\n".join(one.name for one in chosen))
        return
    try:
        print(build(chosen, jobs=given.jobs))
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

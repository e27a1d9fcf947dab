"""Builds ATMM's compiled core. Everything else about the package is in pyproject.toml.

The core is optional: without a compiler the install goes on and the reference operator serves.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CORE = ROOT / "csrc" / "atmm"
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden"),
    "-fno-strict-aliasing",  # scratch holds fp32 and pairs of bf16 in turn
    "-ffp-contract=off",  # sums are what the source says, whatever the rows of a tile
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # in the compiler's own intrinsics
]
CPU = ["apply", "products", "merge", "table", "threads", "pack", "dispatch"]


def _generator():
    spec = importlib.util.spec_from_file_location("generate", CORE / "cpu" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


class BuildCore(build_ext):
    """Generates the kernels and compiles each unit with the flags of its instruction set."""

    def build_extension(self, ext: Extension) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            self.warn(f"ATMM's core is not built for {platform.machine()}")
            return
        import pybind11

        generated = Path(self.build_temp) / "atmm"
        units = _generator().write(generated)
        units += [(CORE / "cpu" / f"{name}.cpp", ()) for name in CPU]
        units += [(CORE / "bindings.cpp", ())]
        include = [str(CORE / "include"), str(CORE / "cpu"), str(generated), pybind11.get_include()]
        include += self.include_dirs or []
        # setuptools' compiler objects are not made for threads: one unit at a time in each.
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            objects = list(pool.map(lambda unit: self._object(*unit, include, generated), units))
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, target, libraries=["dl", "pthread"], target_lang="c++"
        )

    def _object(self, source: Path, flags: tuple[str, ...], include: list[str], build: Path) -> str:
        """Compile one unit, unless its object is newer than all sources."""
        target = build / f"{source.stem}.o"
        headers = list(CORE.rglob("*.h"))
        if source.stem == "table":
            headers += build.glob("*.inc")
        newest = max(p.stat().st_mtime for p in [source, *headers])
        if not target.exists() or target.stat().st_mtime < newest:
            command = [*self.compiler.compiler_so_cxx, *FLAGS, *flags]
            command += [f"-I{path}" for path in include] + ["-c", str(source), "-o", str(target)]
            self.spawn(command)
        return str(target)


setup(
    ext_modules=[Extension("vlora.atmm._cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildCore},
)

"""Builds the compiled kernels. Everything else about the package is in pyproject.toml.

They are optional: without a compiler the install goes on and the reference operators serve.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden"),
    "-fno-strict-aliasing",  # scratch holds fp32 and pairs of bf16 in turn
    "-ffp-contract=off",  # sums are what the source says, whatever the rows of a tile
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # in the compiler's own intrinsics
]


class BuildKernels(build_ext):
    """Generates the kernels and compiles each unit with the flags of its instruction set."""

    def build_extension(self, ext: Extension) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            self.warn(f"the kernels are not built for {platform.machine()}")
            return
        import pybind11

        sys.path.insert(0, str(CSRC))
        import kernels

        build = Path(self.build_temp) / "kernels"
        include = [*map(str, kernels.INCLUDE), str(build), pybind11.get_include()]
        include += self.include_dirs or []
        headers = [*CSRC.rglob("*.h"), *build.glob("*.inc")]

        def compiled(unit: kernels.Unit) -> str:
            """The unit's object: compiled, unless it is newer than all sources."""
            target = build / kernels.object_name(unit)
            newest = max(path.stat().st_mtime for path in [unit.source, *headers])
            if not target.exists() or target.stat().st_mtime < newest:
                command = [*self.compiler.compiler_so_cxx, *FLAGS, *unit.flags]
                command += [f"-I{path}" for path in include]
                self.spawn([*command, "-c", str(unit.source), "-o", str(target)])
            return str(target)

        units = [*kernels.units(build), *kernels.bindings(build)]
        # setuptools' compiler objects are not made for threads: one unit at a time in each.
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            objects = list(pool.map(compiled, units))
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, target, libraries=["dl", "pthread"], target_lang="c++"
        )


class BuildWithData(build_py):
    """Puts what lies beside the package in the source tree into the wheel, as `vlora/_data`."""

    DATA = ("model_repository", "tools/demo/checkpoint", "tools/demo/adapters")

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in self.DATA:
            target = Path(self.build_lib) / "vlora" / "_data" / folder
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    ext_modules=[Extension("vlora._kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildWithData},
)

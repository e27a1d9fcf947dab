"""Build of the compiled kernels. pyproject.toml describes the rest of the package.

The kernels are optional. Without a compiler, installation continues, and the package uses its
reference operators.
"""

from __future__ import annotations

import itertools
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
OBJECTS = ROOT / "build" / "kernels"
"""Folder of the generated sources and the objects of editable installations. A later one uses the
objects again, also if the former was interrupted. setuptools would delete its own folder."""
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden"),
    # The same scratch memory holds fp32 values and, later, pairs of bf16.
    "-fno-strict-aliasing",
    # Fused multiply-adds would make results depend on the tile.
    "-ffp-contract=off",
    # The intrinsics headers of the compiler cause false warnings of these kinds.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]


class BuildKernels(build_ext):
    """Generates the kernels and compiles each unit with the flags of its instruction set."""

    def build_extension(self, ext: Extension) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            self.warn(f"no kernels are built for {platform.machine()}, only for x86_64")
            return
        import pybind11

        sys.path.insert(0, str(CSRC))
        import kernels
        from objects import Object

        build = OBJECTS if self.editable_mode else Path(self.build_temp).resolve() / "kernels"
        units = [*kernels.units(build), *kernels.bindings(build)]
        include = [f"-I{path}" for path in (*kernels.INCLUDE, build, *(self.include_dirs or []))]
        # pip installs pybind11 in a new folder for each build. The version stands for its headers,
        # which the compiler does not list as dependencies because they are system headers.
        common = [*self.compiler.compiler_so_cxx, *FLAGS, *include]
        common += [f"-DVLORA_PYBIND11={pybind11.__version__}"]
        system = ["-isystem", pybind11.get_include()]
        objects = {
            unit: Object(
                build / kernels.object_name(unit), [*common, *unit.flags, "-c", str(unit.source)]
            )
            for unit in units
        }
        stale = [one for one in objects.values() if not one.is_current()]
        started = itertools.count(1)

        def compile_object(one: Object) -> None:
            print(f"compiling {next(started)} of {len(stale)}: {one.path.stem}", flush=True)
            # setuptools' compiler object is not thread-safe, but `spawn` only starts a process.
            one.compile(lambda command: self.spawn([*command, *system]))

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            list(pool.map(compile_object, stale))
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            [str(objects[unit].path) for unit in kernels.link_order(units)],
            target,
            libraries=["dl", "pthread"],
            target_lang="c++",
        )


class BuildWithData(build_py):
    """Copies the data folders of the source tree into the wheel, as `vlora/_data`."""

    DATA = (
        "docker/chart/files",
        "model_repository",
        "tools/demo/checkpoint",
        "tools/demo/adapters",
        "tools/demo/samples",
    )

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

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
            """The unit's object: compiled, unless it is newer than all that it was made of."""
            target = build / kernels.object_name(unit)
            made_of = _made_of(target.with_suffix(".d")) or [unit.source, *headers]
            if not _newer(target, made_of):
                command = [*self.compiler.compiler_so_cxx, *FLAGS, *unit.flags]
                command += ["-MMD", "-MF", str(target.with_suffix(".d"))]
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


def _made_of(rule: Path) -> list[Path]:
    """The files that the compiler read, as it wrote them down; empty where it has not yet."""
    if not rule.exists():
        return []
    return [Path(name) for name in rule.read_text().replace("\\\n", " ").split()[1:]]


def _newer(target: Path, sources: list[Path]) -> bool:
    if not target.exists() or not all(source.exists() for source in sources):
        return False
    return target.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


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

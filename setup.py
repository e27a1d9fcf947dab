"""Build of the compiled kernels. pyproject.toml describes the rest of the package.

The kernels are optional. Without a compiler, installation continues, and the package uses its
reference operators.
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

        build = Path(self.build_temp) / "kernels"
        include = [*map(str, kernels.INCLUDE), str(build), pybind11.get_include()]
        include += self.include_dirs or []
        headers = [*CSRC.rglob("*.h"), *build.glob("*.inc")]

        def compile_unit(unit: kernels.Unit) -> str:
            """Compile a unit if a file that it depends on has changed. Return the object file."""
            target = build / kernels.object_name(unit)
            dependencies = _dependencies(target.with_suffix(".d")) or [unit.source, *headers]
            if not _is_newer(target, dependencies):
                command = [*self.compiler.compiler_so_cxx, *FLAGS, *unit.flags]
                command += ["-MMD", "-MF", str(target.with_suffix(".d"))]
                command += [f"-I{path}" for path in include]
                self.spawn([*command, "-c", str(unit.source), "-o", str(target)])
            return str(target)

        units = [*kernels.units(build), *kernels.bindings(build)]
        # setuptools' compiler object is not thread-safe, but `spawn` only starts a process.
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            objects = dict(zip(units, pool.map(compile_unit, units), strict=True))
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            [objects[unit] for unit in kernels.link_order(units)],
            target,
            libraries=["dl", "pthread"],
            target_lang="c++",
        )


def _dependencies(rule: Path) -> list[Path]:
    """Return the files that a compiler's dependency file lists; [] if it does not exist yet."""
    if not rule.exists():
        return []
    return [Path(name) for name in rule.read_text().replace("\\\n", " ").split()[1:]]


def _is_newer(target: Path, sources: list[Path]) -> bool:
    """Return whether the target and all sources exist, and no source is newer than the target."""
    if not target.exists() or not all(source.exists() for source in sources):
        return False
    return target.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


class BuildWithData(build_py):
    """Copies the data folders of the source tree into the wheel, as `vlora/_data`."""

    DATA = (
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

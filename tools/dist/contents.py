"""Check that the wheel and the sdist contain the right files and no others.

The archives are read without being installed.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

PACKAGE = PurePosixPath("backend_src/vlora")
DEMO = ("tools/demo/checkpoint/", "tools/demo/adapters/", "tools/demo/samples/")
DATA = ("docker/chart/files/", "model_repository/", *DEMO)
"""Folders of the source tree that the wheel contains under `vlora/_data`."""
TO_BUILD = ("csrc/", "backend_src/vlora/", *DATA)
TO_BUILD_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "constraints.txt")
"""Folders and files of the source tree that the sdist must contain."""
NEVER = (".so", ".pyc", ".pyo")
"""Endings of compiled files, which the sdist must not contain."""

Contents = Mapping[str, bytes]
"""Contents of an archive or of the source tree, by file name relative to its root."""


def read_wheel(path: Path) -> Contents:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def read_sdist(path: Path) -> Contents:
    """Return the files of an sdist, with its top folder removed from the names."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                found[member.name.partition("/")[2]] = content.read()
    return found


def expected_in_wheel(tree: Iterable[str]) -> dict[str, str]:
    """Return, for each name in the wheel, the file of the source tree that it must equal."""
    expected = {}
    for name in tree:
        path = PurePosixPath(name)
        if path.is_relative_to(PACKAGE):
            expected[str("vlora" / path.relative_to(PACKAGE))] = name
        elif name.startswith(DATA):
            expected[f"vlora/_data/{name}"] = name
    return expected


def faults_of_wheel(wheel: Contents, tree: Contents) -> list[str]:
    """Return one sentence for each fault of the wheel; `tree` has all tracked files."""
    expected = expected_in_wheel(tree)
    info = {name for name in wheel if name.partition("/")[0].endswith(".dist-info")}
    kernels = {name for name in wheel if name.startswith("vlora/_kernels.")}
    faults = []
    if len(kernels) != 1:
        faults.append(f"it must have exactly one compiled module, but has {sorted(kernels)}")
    faults += _differences(wheel, {name: tree[of] for name, of in expected.items()})
    surplus = sorted(set(wheel) - set(expected) - info - kernels)
    faults += [f"{name} must not be in it" for name in surplus]
    if not any(b"Root-Is-Purelib: false" in wheel[name] for name in info if name.endswith("WHEEL")):
        faults.append("it is marked as pure Python")
    return faults


def faults_of_sdist(sdist: Contents, tree: Contents) -> list[str]:
    """Return one sentence for each fault of the sdist; `tree` has all tracked files."""
    names = [name for name in tree if name.startswith(TO_BUILD) or name in TO_BUILD_FILES]
    due = {name: tree[name] for name in names}
    compiled = sorted(name for name in sdist if name.endswith(NEVER))
    return _differences(sdist, due) + [f"{name} must not be in it" for name in compiled]


def _differences(archive: Contents, due: Contents) -> list[str]:
    faults = [f"{name} is missing" for name in sorted(set(due) - set(archive))]
    both = sorted(set(due) & set(archive))
    changed = [name for name in both if archive[name] != due[name]]
    return faults + [f"{name} differs from the source tree" for name in changed]

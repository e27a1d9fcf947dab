"""Write the lock files of the images: one wheel for each package, with its SHA-256.

The versions are those of constraints.txt and of `build-system.requires` in pyproject.toml. Packages
that are in neither file (CUDA's, for example) get the newest compatible version. Each lock is for
one Python and one platform, so `pip install --require-hashes` accepts exactly one file per package.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from clients.common import run_main
from tools.dist.trial import ROOT, WORK, TrialError, run, tools_of

CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
HEADER = "# Written by `make lock`; install with `pip install --require-hashes --requirement`.\n"


@dataclass(frozen=True)
class Lock:
    """A lock file under docker/, and the image whose packages it lists.

    project: whether the dependencies of vlora and of its extras `extras` are included.
    others: further requirements.
    python, glibc: versions in the image.
    cpu: whether torch is the CPU build.
    """

    name: str
    python: tuple[int, int]
    glibc: tuple[int, int]
    project: bool = True
    extras: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    cpu: bool = False

    @property
    def path(self) -> Path:
        return ROOT / "docker" / self.name


def build_requirements() -> list[str]:
    with PROJECT.open("rb") as file:
        return list(tomllib.load(file)["build-system"]["requires"])


SERVING = ("gateway", "structured", "video", "watch")
"""Extras of vlora in both images. The CPU image also has the extra `server`. The GPU image is based
on an image that contains Triton."""

LOCKS = (
    Lock("requirements.build.txt", (3, 11), (2, 36), False, others=tuple(build_requirements())),
    Lock("requirements.cpu.txt", (3, 11), (2, 36), extras=("server", *SERVING), cpu=True),
    Lock("requirements.gpu.txt", (3, 12), (2, 39), extras=SERVING),
)


def supported_tags(python: tuple[int, int], glibc: tuple[int, int]) -> list[Tag]:
    """Return the wheel tags of this Python on x86-64 with this glibc, best first."""
    major, newest = glibc
    legacy = {17: "2014", 12: "2010", 5: "1"}
    platforms = []
    for minor in range(newest, 4, -1):
        platforms.append(f"manylinux_{major}_{minor}_x86_64")
        if minor in legacy:
            platforms.append(f"manylinux{legacy[minor]}_x86_64")
    platforms.append("linux_x86_64")
    interpreter = f"cp{python[0]}{python[1]}"
    return [
        *cpython_tags(python, platforms=platforms),
        *compatible_tags(python, interpreter, platforms),
    ]


def best_wheel(names: Iterable[str], tags: Sequence[Tag]) -> str:
    """Return the file name of the wheel whose tag comes first in `tags`. Raise TrialError if none
    fits."""
    order = {tag: place for place, tag in enumerate(tags)}

    def rank(name: str) -> int:
        return min(order.get(tag, len(tags)) for tag in parse_wheel_filename(name)[3])

    names = list(names)
    best = min(names, key=rank, default="")
    if not best or rank(best) == len(tags):
        raise TrialError(f"none of the wheels {sorted(names)} fits {tags[0]}")
    return best


def line_of(package: dict[str, Any], tags: Sequence[Tag]) -> str:
    """Return the requirement for a package of a pylock.toml, with the hash of its best wheel."""
    hashes = {}
    for wheel in package["wheels"]:
        location = wheel.get("name") or wheel.get("url") or wheel["path"]
        hashes[location.rpartition("/")[2].replace("%2B", "+")] = wheel["hashes"]["sha256"]
    best = best_wheel(hashes, tags)
    return f"{package['name']}=={package['version']} --hash=sha256:{hashes[best]}\n"


def resolve(lock: Lock, torch: Sequence[str], uv: Path, folder: Path, log: Path) -> str:
    """Return the text of a lock file. `torch`: uv's options for the index of torch's CPU build."""
    others, pins, made = folder / "others.in", folder / "pins.txt", folder / "pylock.toml"
    others.write_text("\n".join(lock.others))
    pins.write_text("\n".join([CONSTRAINTS.read_text(), *build_requirements()]))
    command = [uv, "pip", "compile", "--quiet", "--format", "pylock.toml", "--output-file", made]
    command += ["--only-binary", ":all:", "--constraint", pins, "--no-config"]
    command += ["--python-version", ".".join(map(str, lock.python))]
    command += ["--python-platform", "x86_64-manylinux_{}_{}".format(*lock.glibc)]
    command += torch if lock.cpu else []
    command += [f"--extra={extra}" for extra in lock.extras]
    command += [PROJECT, others] if lock.project else [others]
    run(command, log)
    tags = supported_tags(lock.python, lock.glibc)
    packages = tomllib.loads(made.read_text())["packages"]
    return HEADER + "".join(sorted(line_of(package, tags) for package in packages))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dist.lock", description=__doc__)
    parser.add_argument("--torch-wheels", metavar="FOLDER", help="folder with torch's CPU wheel")
    options = parser.parse_args(arguments)
    torch = ["--index", "https://download.pytorch.org/whl/cpu"]
    if options.torch_wheels:
        torch = ["--find-links", options.torch_wheels]
    log = WORK / "logs" / "lock.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    uv = tools_of(WORK, log) / "uv"
    for lock in LOCKS:
        with tempfile.TemporaryDirectory() as folder:
            lock.path.write_text(resolve(lock, torch, uv, Path(folder), log))
        count = len(lock.path.read_text().splitlines()) - 1
        print(f"{lock.path.relative_to(ROOT)}: {count} packages")
    return 0


if __name__ == "__main__":
    run_main(main)

"""Tests that `make lock` takes the tested versions, and one wheel per package by its hash."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.dist.lock import CONSTRAINTS, LOCKS, PROJECT, Lock, best_wheel, line_of, supported_tags
from tools.dist.trial import TrialError

LINE = re.compile(r"([\w.-]+)==([\w.!]+)(\+cpu)? --hash=sha256:[0-9a-f]{64}")
TAGS = supported_tags((3, 11), (2, 36))


def pins(text: str) -> dict[str, str]:
    """Return the version of each package in `name==version` lines."""
    found = re.findall(r"^([\w.-]+)==([\w.!]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def project() -> dict[str, list[str]]:
    """Return the requirements of a build, of the package and of its extras."""
    data = tomllib.loads(PROJECT.read_text())
    package = data["project"]
    extras = package["optional-dependencies"]
    return {"build": data["build-system"]["requires"], "": package["dependencies"], **extras}


def test_an_isolated_build_uses_exact_versions() -> None:
    """pip ignores --constraint there."""
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", one) for one in project()["build"])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_each_requirement_at_its_tested_version_with_a_hash(lock: Lock) -> None:
    text = lock.path.read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(LINE.fullmatch(line) for line in lines)
    locked, tested = pins(text), pins(CONSTRAINTS.read_text()) | pins("\n".join(project()["build"]))
    assert len(locked) == len(lines)
    assert {name: tested.get(name, version) for name, version in locked.items()} == locked


def test_the_locks_include_all_that_the_images_need() -> None:
    needed = project()
    for lock in LOCKS:
        due = [*lock.others, *(needed[""] if lock.project else [])]
        due += [one for extra in lock.extras for one in needed[extra]]
        locked = pins(lock.path.read_text())
        for one in map(Requirement, due):
            assert one.specifier.contains(locked[canonicalize_name(one.name)]), (lock.name, one)


@pytest.mark.parametrize("image", ["cpu", "gpu"])
@pytest.mark.parametrize("extra", ["gateway", "structured", "watch"])
def test_an_image_has_what_its_commands_need(image: str, extra: str) -> None:
    text = (CONSTRAINTS.parent / "docker" / f"requirements.{image}.txt").read_text()
    needed = {canonicalize_name(Requirement(one).name) for one in project()[extra]}
    assert needed <= pins(text).keys()


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["a-1-py3-none-any.whl", "a-1-cp311-cp311-manylinux_2_17_x86_64.whl"], 1),
        (
            ["a-1-cp312-cp312-manylinux_2_28_x86_64.whl", "a-1-cp39-abi3-manylinux2014_x86_64.whl"],
            1,
        ),
        (["a-1-py2.py3-none-any.whl", "a-1-cp311-cp311-musllinux_1_2_x86_64.whl"], 0),
        (["a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "a-1-cp311-cp311-manylinux1_x86_64.whl"], 0),
    ],
)
def test_the_most_specific_wheel_for_the_image_is_chosen(names: list[str], best: int) -> None:
    assert best_wheel(names, TAGS) == names[best]
    wheels = [{"url": f"https://x/{name}", "hashes": {"sha256": name}} for name in names]
    line = line_of({"name": "a", "version": "1", "wheels": wheels}, TAGS)
    assert line == f"a==1 --hash=sha256:{names[best]}\n"


def test_a_package_without_a_wheel_for_the_image_is_an_error() -> None:
    names = ["a-1-cp311-cp311-manylinux_2_39_x86_64.whl", "a-1-cp311-cp311-macosx_11_0_arm64.whl"]
    with pytest.raises(TrialError, match="none of the wheels"):
        best_wheel(names, TAGS)

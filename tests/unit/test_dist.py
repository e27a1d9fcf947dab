"""Tests that `make dist` reports each fault of a wheel or an sdist with its file."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.dist.contents import (
    expected_in_wheel,
    faults_of_sdist,
    faults_of_wheel,
    read_sdist,
    read_wheel,
)
from tools.dist.trial import TrialError, clean_environment, run

TREE = {
    "backend_src/vlora/cli.py": b"code",
    "backend_src/vlora/atmm/tables/x.json": b"{}",
    "model_repository/lmm/config.pbtxt": b"name",
    "tools/demo/checkpoint/config.json": b"{}",
    "tools/demo/show.py": b"not for the wheel",
    "csrc/a.cpp": b"int",
    "pyproject.toml": b"[project]",
    "tests/unit/test_x.py": b"",
}
WHEEL = {
    "vlora/cli.py": b"code",
    "vlora/atmm/tables/x.json": b"{}",
    "vlora/_data/model_repository/lmm/config.pbtxt": b"name",
    "vlora/_data/tools/demo/checkpoint/config.json": b"{}",
    "vlora/_kernels.cpython-311-x86_64-linux-gnu.so": b"ELF",
    "vlora-0.1.0.dist-info/WHEEL": b"Root-Is-Purelib: false\n",
}
SDIST = {name: content for name, content in TREE.items() if not name.startswith("tests")}


def test_a_complete_wheel_and_sdist_have_no_faults() -> None:
    assert faults_of_wheel(WHEEL, TREE) == []
    assert faults_of_sdist(SDIST, TREE) == []


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("vlora/_data/model_repository/lmm/config.pbtxt", None, "is missing"),
        ("vlora/cli.py", b"older code", "differs from the source tree"),
        ("vlora/lost.py", b"code", "must not be in it"),
        ("vlora/_kernels.cpython-311-x86_64-linux-gnu.so", None, "exactly one compiled module"),
        ("vlora-0.1.0.dist-info/WHEEL", b"Root-Is-Purelib: true\n", "pure Python"),
    ],
)
def test_a_fault_of_the_wheel_is_reported(name: str, content: bytes | None, fault: str) -> None:
    wheel = {key: value for key, value in WHEEL.items() if key != name}
    if content is not None:
        wheel[name] = content
    assert any(fault in told for told in faults_of_wheel(wheel, TREE))


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("csrc/a.cpp", None, "csrc/a.cpp is missing"),
        ("pyproject.toml", b"", "pyproject.toml differs"),
        ("backend_src/vlora/_kernels.so", b"ELF", "_kernels.so must not be in it"),
    ],
)
def test_a_fault_of_the_sdist_is_reported(name: str, content: bytes | None, fault: str) -> None:
    sdist = {key: value for key, value in SDIST.items() if key != name}
    if content is not None:
        sdist[name] = content
    assert any(fault in told for told in faults_of_sdist(sdist, TREE))


def test_archives_are_read_as_files_by_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.mkdir("vlora")
        wheel.writestr("vlora/cli.py", b"code")
    (tmp_path / "setup.py").write_bytes(b"setup")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as sdist:
        sdist.add(tmp_path / "setup.py", "vlora-0.1.0/setup.py")
    assert read_wheel(tmp_path / "a.whl") == {"vlora/cli.py": b"code"}
    assert read_sdist(tmp_path / "a.tar.gz") == {"setup.py": b"setup"}


def test_the_wheel_must_contain_the_files_of_the_source_tree() -> None:
    root = Path(__file__).parents[2]
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    )
    due = expected_in_wheel(listed.stdout.split("\n"))
    assert "vlora/_data/model_repository/lmm/1/model.json" in due
    assert "vlora/_data/tools/demo/checkpoint/config.json" in due
    assert "vlora/py.typed" in due
    assert "vlora/_data/tools/demo/samples/index.json" in due
    pages = ("vlora/gateway/static/", "vlora/watch/static/")
    page = {name for name in due if name.startswith(pages)}
    assert {f"{folder}index.html" for folder in pages} <= page
    package = {Path(name).suffix for name in {*due} - page if not name.startswith("vlora/_data")}
    assert package <= {".py", ".json", ".typed"}, "pyproject.toml takes no other into the wheel"
    assert not [name for name in due if name.startswith(("tests", "csrc", "vlora/_data/tests"))]


def test_a_failing_command_is_reported_with_its_last_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(
        TrialError, match=r"ended with status 3; .*log ends with:(?s:.*)no such wheel"
    ):
        run([sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)"], log)


def test_a_fresh_environment_inherits_nothing_from_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VLORA_MODEL", "/somewhere")
    found = clean_environment(tmp_path)
    assert found["PATH"].startswith(str(tmp_path / "bin"))
    assert not {"PYTHONPATH", "VLORA_MODEL", "VIRTUAL_ENV"} & set(found)

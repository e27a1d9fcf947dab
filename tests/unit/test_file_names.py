"""Tests of names that are not ASCII, in an interpreter that decodes file names as ASCII."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ascii_file_names import ASCII
from vlora.errors import MAX_SHOWN, InvalidArgument
from vlora.file_names import decoded, openable, to_path, to_text
from vlora.model.weight_files import INDEX

NAMES = ["zählen", "数える", "spaces and ünicode", "plain"]
NOT_UTF8 = b"bad-\xff\xc3"


def loaded(version: Path) -> Any:
    """Return what `tests.support.ascii_file_names` says about a model's folder."""
    command = [sys.executable, "-m", "tests.support.ascii_file_names", json.dumps(str(version))]
    environment = os.environ | ASCII | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    return json.loads(done.stdout)


@pytest.fixture
def version(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> Path:
    """Return a model's folder. All of its paths have names that are not ASCII."""
    model = shutil.copytree(checkpoint, tmp_path / "modèle")
    index = json.loads((model / INDEX).read_bytes())
    index["metadata"]["author"] = "Zoë"
    (model / INDEX).write_text(json.dumps(index, ensure_ascii=False), "utf-8")
    root = tmp_path / "Anpassungen für später"
    for name in (*map(os.fsencode, NAMES), NOT_UTF8):
        shutil.copytree(os.fsencode(adapters_dir / "attention-r4"), os.fsencode(root) + b"/" + name)
    (root / "gebrochen-ß").mkdir()
    (root / "gebrochen-ß" / "README.md").touch()
    folder = tmp_path / "dépôt" / "1"
    folder.mkdir(parents=True)
    keys = {"model": "../../modèle", "adapters": f"../../{root.name}", "kv_cache_tokens": 1024}
    (folder / "model.json").write_text(json.dumps(keys, ensure_ascii=False), "utf-8")
    aliases = {"Zahl-ö": "zählen"}
    (folder / "multi_lora.json").write_text(json.dumps(aliases, ensure_ascii=False), "utf-8")
    return folder


def test_a_checkpoint_and_adapters_with_any_names_are_served(version: Path) -> None:
    found = loaded(version)
    assert found["encoding"] == "ascii"
    assert found["served"] == sorted([*NAMES, "Zahl-ö"])
    assert set(found["found"]) == {*NAMES, "Zahl-ö", "gebrochen-ß", "bad-\udcff\udcc3"}
    bad, broken = sorted(found["broken"])
    assert (bad, broken) == (r"bad-\udcff\udcc3", "gebrochen-ß")
    assert "Anpassungen für später" in found["broken"][bad]
    assert "has a name that is not UTF-8; rename it" in found["broken"][bad]
    assert "adapter 'gebrochen-ß': adapter_config.json" in found["broken"][broken]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "modèle holds no checkpoint"),
        (INDEX, b"{", f"modèle/{INDEX} cannot be read"),
        ("processor_config.json", b"{", "modèle has no readable image processor"),
    ],
)
def test_an_error_shows_a_path_as_the_user_wrote_it(
    version: Path, file: str, content: bytes | None, message: str
) -> None:
    path = version.parents[1] / "modèle" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert message in loaded(version)["refused"]


def test_text_and_paths_are_converted_and_paths_in_messages_are_decoded() -> None:
    for name in ("zählen", "plain", os.fsdecode(NOT_UTF8)):
        assert to_text(to_path(name)) == name
    undecoded = "zählen".encode().decode("ascii", "surrogateescape")
    assert decoded(undecoded) == "zählen"
    assert decoded(f"no such file: {undecoded!r}, \\udcff") == "no such file: 'zählen', \\udcff"
    assert decoded("a \udcff and a \ud800") == "a \udcff and a \ud800"
    assert str(InvalidArgument(f"{undecoded} is missing")) == "zählen is missing"
    assert str(InvalidArgument("x" * (MAX_SHOWN + 1))) == "x" * MAX_SHOWN + " …"


def test_a_folder_whose_path_is_not_text_has_another_path_that_is(tmp_path: Path) -> None:
    folder = to_path(f"{tmp_path}/{os.fsdecode(NOT_UTF8)}")
    folder.mkdir()
    (folder / "file").touch()
    with openable(folder) as path:
        assert [entry.name for entry in path.iterdir()] == ["file"]
        assert str(path).encode()
    with openable(tmp_path) as path:
        assert path == tmp_path

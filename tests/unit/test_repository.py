"""Tests of `vlora repository FOLDER`, which copies the model repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlora.cli import app
from vlora.config import load_options
from vlora.errors import InvalidArgument
from vlora.launcher.repository import copy_with_overrides, write_repository
from vlora.paths import model_repository


def files_of(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "__pycache__" not in name}


def test_the_copy_has_all_models_and_absolute_paths_of_the_demo(tmp_path: Path) -> None:
    written = write_repository(tmp_path / "mine")
    assert files_of(written) == files_of(model_repository())
    options = load_options(written / "lmm" / "1" / "model.json", environment={})
    assert (options.model / "config.json").is_file()
    assert options.adapters is not None
    assert options.adapters.is_dir()


def test_explicit_folders_are_written_unchanged(tmp_path: Path) -> None:
    written = write_repository(tmp_path, Path("/models/llava"), Path("/models/adapters"))
    keys = json.loads((written / "lmm" / "1" / "model.json").read_text())
    assert (keys["model"], keys["adapters"]) == ("/models/llava", "/models/adapters")


def test_another_model_does_not_get_the_adapters_of_the_demo(tmp_path: Path) -> None:
    written = write_repository(tmp_path / "mine", Path("/models/llava"))
    options = load_options(written / "lmm" / "1" / "model.json", environment={})
    assert (options.model, options.adapters) == (Path("/models/llava"), None)
    copy = tmp_path / "copy"
    copy_with_overrides(model_repository(), copy, {"model": "/models/llava"}, {})
    options = load_options(copy / "lmm" / "1" / "model.json", environment={})
    assert (options.model, options.adapters) == (Path("/models/llava"), None)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(InvalidArgument, match="is not empty"):
        write_repository(tmp_path)
    assert files_of(tmp_path) == {"precious"}
    with pytest.raises(InvalidArgument, match="is a file"):
        write_repository(tmp_path / "precious")


def test_the_command_prints_how_to_serve_the_copy(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["repository", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert "vlora serve --repository" in result.output
    again = CliRunner().invoke(app, ["repository", str(tmp_path / "new")])
    assert again.exit_code == 1
    assert "is not empty" in again.output

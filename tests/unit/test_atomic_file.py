"""Tests of folders that appear atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vlora.atomic_file import new_folder
from vlora.errors import InvalidArgument


def test_files_of_a_new_folder_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "new") as part:
            (part / "inner").mkdir()
            save_file({"a": torch.zeros(2)}, part / "inner" / "a.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "inner" / "a.safetensors").stat().st_mode & 0o777 == 0o640


def test_a_new_folder_appears_only_without_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "new") as part:
        (part / "a" / "b").write_text("no such folder")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidArgument, match="exists; name a folder that does not"):
        new_folder(tmp_path).__enter__()

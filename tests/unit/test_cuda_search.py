"""Tests of the search for the fastest tiles on a GPU, with emulated kernels."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from vlora.atmm.cuda.choice import KernelChoice, Shape, Table
from vlora.atmm.cuda.operator import Operator, using
from vlora.atmm.search import cuda_search
from vlora.atmm.search.cuda_search import CudaSearch, shapes, write_table
from vlora.cli import tile_search as command

SMALL = Shape("bf16", 16, 256, 256, 8, 2)


def test_a_search_is_resumed_and_its_table_is_read_by_the_operator(
    emulated: Operator, tmp_path: Path
) -> None:
    search, lines = CudaSearch(emulated, cold_bytes=1), tmp_path / "search.jsonl"
    first = list(search.search([SMALL], lines, 60))
    assert [entry["key"] for entry in first] == [SMALL.key]
    assert first[0]["hot_us"] > 0
    assert first[0]["tried"] > 3
    assert list(search.search([SMALL], lines, 60)) == first
    path = write_table(emulated, first, tmp_path)
    found = Table.load(path, emulated.library).find(SMALL)
    assert found == KernelChoice.parse(first[0]["config"])


def test_the_command_searches_gpu_tiles_and_reports_a_missing_gpu(
    emulated: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(command.tile_search)
    words = ["--cuda", "--dtypes", "bf16", "--output", str(tmp_path), "--state", str(tmp_path)]
    if not torch.cuda.is_available():
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 1
        assert "needs a GPU" in refused.output
    monkeypatch.setattr(cuda_search, "CudaSearch", partial(CudaSearch, cold_bytes=1))
    monkeypatch.setattr(cuda_search, "shapes", lambda dtypes: [SMALL])
    with using(emulated):
        done = CliRunner().invoke(app, words)
    assert "1 of 1 shapes" in done.output
    (path,) = tmp_path.glob("cuda-*.json")
    assert list(json.loads(path.read_text())["entries"]) == [SMALL.key]


def test_the_library_contains_every_candidate_of_the_search(emulated: Operator) -> None:
    search = CudaSearch(emulated)
    for shape in shapes():
        found = search.candidates(shape)
        assert found[0] == search.built_in(shape)
        assert len(found) <= 24
        for choice in found:
            choice.on(emulated.library, shape.dtype)
            assert KernelChoice.parse(choice.name) == choice

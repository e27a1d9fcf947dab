"""Parts of the command line that need no server."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.fakes import adapter
from vlora import paths
from vlora.cli.adapters import table_of
from vlora.cli.serve import first_question
from vlora.config import Options


def test_the_table_of_adapters_fits_into_80_columns() -> None:
    kinds = ("q", "k", "v", "o", "gate", "up", "down")
    targets = tuple(f"{kind}_proj" for kind in kinds)
    info = replace(adapter("inspection", ("vqa",)), ranks=(4, 8, 16), targets=targets)
    shown = io.StringIO()
    Console(file=shown, width=80).print(table_of([info]))
    rows = [line.split() for line in shown.getvalue().splitlines() if line.strip()]
    assert rows[0] == ["adapter", "ranks", "targets", "tasks", "labels", "digest"]
    assert len(rows) <= 4
    assert rows[2][:4] == ["inspection", "4", "8", "16"]
    assert [word for row in rows[2:] for word in row][4:] == [*kinds, "vqa", "-", "digest-of-in"]


@pytest.mark.parametrize("demo", [True, False])
def test_the_command_that_serve_prints_sends_a_request_with_a_picture(
    demo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = paths.root() / "tools/demo"
    own = tmp_path / "picture.png"
    # The picture is longer than an argument may be.
    own.write_bytes(b"a picture of the user's " * 9000)
    monkeypatch.chdir(tmp_path)
    model = samples / "checkpoint" if demo else tmp_path
    command = first_question(Options(model=model), "localhost:8000")
    asks, _, sends = command.rpartition("|")
    assert sends == " curl -s localhost:8000/v2/models/video_analytics/generate -d @-; echo"
    sent = subprocess.run(["sh", "-c", asks], capture_output=True, check=True).stdout
    picture = samples / "samples/vqa.png" if demo else own
    assert base64.b64decode(json.loads(sent)["image"]) == picture.read_bytes()

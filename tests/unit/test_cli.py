"""The command line's parts that need no server."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from tests.fakes import adapter
from vlora.cli import _table_of


def test_a_row_of_adapters_is_read_at_80_columns() -> None:
    kinds = ("q", "k", "v", "o", "gate", "up", "down")
    targets = tuple(f"{kind}_proj" for kind in kinds)
    info = replace(adapter("inspection", ("vqa",)), ranks=(4, 8, 16), targets=targets)
    shown = io.StringIO()
    Console(file=shown, width=80).print(_table_of([info]))
    rows = [line.split() for line in shown.getvalue().splitlines() if line.strip()]
    assert rows[0] == ["adapter", "ranks", "targets", "tasks", "labels", "digest"]
    assert len(rows) <= 4
    assert rows[2][:4] == ["inspection", "4", "8", "16"]
    assert [word for row in rows[2:] for word in row][4:] == [*kinds, "vqa", "-", "digest-of-in"]

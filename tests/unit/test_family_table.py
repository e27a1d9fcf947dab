"""Tests of the table in `tests/README.md`: it lists all families, and the tests in it exist."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.checkpoints import FAMILIES
from vlora.model.multimodal import MULTIMODAL

TESTS = Path(__file__).parents[1]


def test_the_table_of_families_lists_every_family_and_tests_that_exist() -> None:
    lines = (TESTS / "README.md").read_text().splitlines()
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    header, *cases = [row for row in rows if len(row) > 2]
    assert sorted(header[1:-1]) == sorted(MULTIMODAL) == sorted([*FAMILIES, "qwen"])
    functions = {row[0]: row[1] for row in rows if len(row) == 2 and row[0].isdigit()}
    assert {row[-1] for row in cases} == functions.keys()
    for name in functions.values():
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {getattr(node, "name", None) for node in tree.body}, name
    for case, *cells, number in cases:
        place = "gRPC" if functions[number].startswith("triton/") else "engine"
        assert set(cells) - {"no"} == {place}, case

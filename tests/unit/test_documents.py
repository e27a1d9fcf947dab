"""Tests that what the documents refer to exists, and that the check finds what does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.check_documents import ROOT, faults, files

PAGES = sorted(name for name in files() if name.endswith(".md"))


@pytest.mark.parametrize("name", PAGES)
def test_what_a_document_refers_to_exists(name: str) -> None:
    assert faults(ROOT / name) == []


def test_every_cited_decision_is_in_the_list_of_decisions() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    records, _, rest = index.partition("Numbers of merged records")
    merged = rest.partition("The numbers")[0]
    known = {*re.findall(r"^- (\d+): ", records, flags=re.MULTILINE), *re.findall(r"\d+", merged)}
    cited = {
        (number, name)
        for name in files()
        if name.endswith((".md", ".py", ".h", ".cpp", ".cu", ".cuh"))
        for text in re.findall(
            r"\b[Dd]ecisions? \d+(?:(?:,| and)+ \d+)*", (ROOT / name).read_text()
        )
        for number in re.findall(r"\d+", text)
    }
    assert len(cited) > 20
    assert {citation for citation in cited if citation[0] not in known} == set()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a](missing.md)", "link missing.md: no such file"),
        ("# Head\n[a](#head) [b](#tail)", "link #tail: no such heading"),
        ("`docs/missing.md` and `text/plain`", "path docs/missing.md: no such file"),
        ("`no_folder/op.py`", "path no_folder/op.py: no such file"),
        ("`nothing_is_called_so.cpp`", "file nothing_is_called_so.cpp: no such file"),
        ("`make test` and `make\nnothing`", "make nothing: no target nothing"),
        ("```\nvlora nothing  # why\n```", "vlora nothing  # why: no such command"),
        ("`vlora probe --nothing 1`", "vlora probe --nothing 1: no option --nothing"),
        ("`python -m benchmarks none`", "python -m benchmarks none: no benchmark none"),
        ("`python -m tools.none`", "python -m tools.none: no module tools.none"),
    ],
)
def test_the_check_finds_what_does_not_exist(tmp_path: Path, text: str, fault: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert faults(page) == [fault]

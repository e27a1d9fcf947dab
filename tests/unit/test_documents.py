"""Tests of the documents: their lengths, the index of decisions, and the targets of links."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORDS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "csrc").rglob("*.md"),
        ROOT / "tests" / "README.md",
    ]
)
PAGE_COLUMNS = 120
KERNEL_PAGE_LINES = 250
RECORD_LINES = 60
RECORD_COLUMNS = 100


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {
        "".join(
            "-" if char == " " else char
            for char in heading.strip().lower()
            if char in " -_" or unicodedata.category(char)[0] in "LN"
        )
        for heading in headings
    }


@pytest.mark.parametrize("record", RECORDS, ids=_name)
def test_a_decision_record_is_one_page_with_a_status_a_question_and_a_decision(
    record: Path,
) -> None:
    text = record.read_text()
    lines = text.splitlines()
    assert len(lines) <= RECORD_LINES
    assert max(map(len, lines)) <= RECORD_COLUMNS
    assert text.startswith(f"# {int(record.name[:4])}. ")
    assert "\n**Status:** " in text
    assert "\n## Question\n" in text
    assert "\n## Decision\n" in text


def test_the_index_lists_every_decision_once() -> None:
    index = (DOCS / "decisions" / "README.md").read_text()
    listed = re.findall(r"^\| (\d+) \| \[.*?\]\((\d{4}-[\w-]+\.md)\)", index, flags=re.MULTILINE)
    assert [name for _, name in listed] == [record.name for record in RECORDS]
    assert [int(number) for number, _ in listed] == [int(record.name[:4]) for record in RECORDS]


def test_every_cited_decision_has_a_record_or_is_part_of_another() -> None:
    index = (DOCS / "decisions" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", index, flags=re.MULTILINE)
    known = {int(number) for row in rows for number in row.split(", ")}
    sources = [*PAGES, *(ROOT / "backend_src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    cited = {
        (int(number), _name(path))
        for path in sources
        for citation in re.findall(
            r"\b[Dd]ecisions? (\d+(?:(?:,| and|, and| to) \d+)*)", path.read_text()
        )
        for number in re.findall(r"\d+", citation)
    }
    assert {citation for citation in cited if citation[0] not in known} == set()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_line_but_rows_of_tables_is_within_the_limit(page: Path) -> None:
    """Rows of tables may be longer, because Markdown cannot break them."""
    long = [
        f"{number}: {len(line)} characters"
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > PAGE_COLUMNS and not line.lstrip().startswith("|")
    ]
    assert long == []


@pytest.mark.parametrize("page", sorted((DOCS / "kernels").glob("*.md")), ids=_name)
def test_a_page_about_kernels_stays_within_its_length(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= KERNEL_PAGE_LINES


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_has_its_target(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken

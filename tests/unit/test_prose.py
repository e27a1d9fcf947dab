"""Tests that texts are plain technical English, as far as a simple check can tell."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend_src", "benchmarks", "clients", "csrc", "model_repository", "tests", "tools")

SUBJECTLESS = frozenset(
    """
    about above after against also and any anybody as at before behind below beside besides
    between but by either else everybody for from he here how if in it its just least
    like more most neither no nobody none nor not of off on once only or out over rather she so
    somebody such than that their them then there these they this those through to too
    under until upon what whatever when where whether which while who whoever whom whose why
    with within without yet
    """.split()  # noqa: SIM905
)
"""First words of a docstring that neither starts with a verb nor names a thing."""

ARCHAIC = re.compile(
    r"\b(anew|anybody|nobody|whoever|whomever|whom|lest|thereof|therein|hitherto|nigh|wherein"
    r"|(?:is|are|was|were) told|(?:that|which|what) (?:is|are) none"
    r"|so that they meet|begun|side by side"
    r")\b"
)
"""Words and turns of phrase that technical English does without."""

LIMITS = {"README.md": 130, "CONTRIBUTING.md": 120, "docs/decisions": 60, "docs/kernels": 250}
"""Maximum number of lines of a prose file, or of each file in a folder but its index."""


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def texts() -> list[Path]:
    """Every file of prose or source that git tracks."""
    endings = (".md", ".py", ".h", ".cpp", ".cu", ".cuh", ".yaml", ".pbtxt")
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    return [ROOT / name for name in names if name.endswith(endings)]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those below attributes and constants included."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def faults_of(text: str) -> str | None:
    """Return what is wrong with a docstring, or None."""
    first = re.match(r"[A-Za-z]+", text)
    if first and first[0].lower() in SUBJECTLESS:
        return f"begins with '{first[0]}'"
    sentence = text.split("\n\n")[0].rstrip()
    return (
        None if sentence.endswith((".", ":", "?", "!", "::", "```")) else "does not end a sentence"
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_start_with_a_verb_or_name_the_thing(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}: {text.splitlines()[0][:70]}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] == folder
        for line, text in docstrings(path)
        if (fault := faults_of(text)) is not None
    ]
    assert faults == []


def test_no_text_uses_archaic_words() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]}"
        for path in texts()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := ARCHAIC.search(line))
    ]
    assert faults == []


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_prose_files_stay_within_their_limits(name: str, limit: int) -> None:
    path = ROOT / name
    files = [path] if path.is_file() else sorted(set(path.glob("*.md")) - {path / "README.md"})
    assert files, f"{name} is missing"
    long = {
        file.name: lines for file in files if (lines := len(file.read_text().splitlines())) > limit
    }
    assert long == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Of what the best number earns more.", "begins with 'Of'"),
        ("What a step does.", "begins with 'What'"),
        ("Return the pages", "does not end a sentence"),
        ("Return the pages.", None),
        ("Seconds until the deadline.", None),
    ],
)
def test_the_check_itself_finds_faults(text: str, fault: str | None) -> None:
    assert faults_of(text) == fault

"""Check that what the documents refer to exists.

`python tools/check_documents.py` prints the links, anchors, paths, source files, `make` targets,
`vlora` commands and options, benchmarks and modules of Markdown files that do not exist.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASES = ("", "backend_src/vlora/", "csrc/", "tests/")  # beside the folder of the page
PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)+/?")
SOURCE = re.compile(r"[\w*-]+\.(?:py|h|cpp|cu|cuh|sh)")
BLOCK = re.compile(r"^ *```.*?\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)


@functools.cache
def files() -> frozenset[str]:
    """Return all files of the tree that git does not ignore, and their folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    names = [name for name in names if (ROOT / name).exists()]
    return frozenset(names).union(str(parent) for name in names for parent in Path(name).parents)


@functools.cache
def help_of(*program: str) -> str:
    """Return what a program of this project prints for `--help`, or nothing if it fails."""
    command = [sys.executable, "-m", *program, "--help"]
    settings = {"PYTHONPATH": str(ROOT / "backend_src"), "COLUMNS": "200", "NO_COLOR": "1"}
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    return str(run(command, env=os.environ | settings).stdout)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    return {
        "".join(
            "-" if char == " " else char
            for char in heading.strip().lower()
            if char in " -_" or unicodedata.category(char)[0] in "LN"
        )
        for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    }


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield each relative link whose file or anchor does not exist."""
    for link in re.findall(r"\]\(\s*(?!\w+:)([^)\s]+)\s*\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"link {link}: no such file"
        elif anchor and anchor not in anchors(target.read_text()):
            yield f"link {link}: no such heading"


def missing_paths(page: Path, words: Sequence[str]) -> Iterator[str]:
    """Yield each source file that is missing, and each path in a folder of the tree."""
    bases = (*BASES, f"{os.path.relpath(page.parent, ROOT)}/")
    for word in dict.fromkeys(re.split(r"::|:\d", word)[0] for word in words):
        pattern = re.sub(r"\b[A-Z]{4,}\b|(?<=_)[A-Z]{4,}", "*", word)  # NAME stands for any name
        if SOURCE.fullmatch(word):
            if not any(fnmatch(Path(file).name, pattern) for file in files()):
                yield f"file {word}: no such file"
        elif PATH.fullmatch(word):
            folders = {os.path.normpath(base + word.partition("/")[0]) for base in bases}
            names = {os.path.normpath(base + text) for base in bases for text in (word, pattern)}
            known = any(fnmatch(file, name) for name in names for file in files())
            is_path = folders & files() or SOURCE.fullmatch(Path(word).name)
            if is_path and not known:  # others are names, such as media types
                yield f"path {word}: no such file"


def unknown_commands(lines: Sequence[str]) -> Iterator[str]:
    """Yield each `make` target, `vlora` command or option, and benchmark that does not exist."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for line in lines:
        match re.split(r" [#|&;]|;| -- ", line)[0].split():
            case ["make", target, *_] if re.fullmatch("[a-z-]+", target) and target not in targets:
                yield f"{line}: no target {target}"
            case ["python", "-m", "benchmarks", name, *_] if re.fullmatch("[a-z][a-z-]+", name):
                if not re.search(rf"^  {name} ", help_of("benchmarks"), flags=re.MULTILINE):
                    yield f"{line}: no benchmark {name}"
            case ["python", "-m", module, *_] if re.match(r"(tools|tests|benchmarks)\.", module):
                if not files() & {(path := module.replace(".", "/")), f"{path}.py"}:
                    yield f"{line}: no module {module}"
            case ["vlora", command, *rest] if re.fullmatch("[a-z][a-z-]+", command):
                nested = [
                    word
                    for word in rest[:1]
                    if command in ("adapters", "models") and word[0].islower()
                ]
                text = help_of("vlora.cli", command, *nested)
                options = re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(rest)) if text else []
                if not text:
                    yield f"{line}: no such command"
                unknown = [word for word in options if not re.search(rf"{word}(?![\w-])", text)]
                yield from (f"{line}: no option {option}" for option in unknown)


def faults(page: Path) -> list[str]:
    """Return all faults of a page."""
    text = page.read_text()
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    code = [*spans, *"\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()]
    missing = [*broken_links(page, text), *missing_paths(page, " ".join(code).split())]
    return [*missing, *unknown_commands(code)]


if __name__ == "__main__":
    pages = [ROOT / name for name in sorted(files()) if name.endswith(".md")]
    found = [f"{page.relative_to(ROOT)}: {fault}" for page in pages for fault in faults(page)]
    print("\n".join(found) or "no faults")
    sys.exit(bool(found))

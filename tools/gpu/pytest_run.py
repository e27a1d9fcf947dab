"""Run of pytest in a stage of `make gpu`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tools.gpu.report import write
from tools.gpu.stages import ROOT, Lacking


def run_tests(
    result: Path,
    files: Sequence[str],
    options: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run pytest, write its counts to `result`.json, and return them as text."""
    if importlib.util.find_spec("pytest") is None:
        raise Lacking("this Python has no pytest")
    report = result.with_suffix(".xml")
    command = [*_pytest(), *files, *options, f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(variables or {})}, check=False)
    counts = _counts(report)
    write(result.with_suffix(".json"), counts)
    said = ", ".join(
        f"{counts[name]} {name}" for name in ("passed", "failures", "errors", "skipped")
    )
    if done.returncode:
        raise SystemExit(said)
    return said


def _pytest() -> list[str]:
    """Return pytest's command. In it, warnings are not errors, since another version of torch may
    warn.
    """
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
    ]


def _counts(report: Path) -> dict[str, int]:
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            for name in counts:
                counts[name] += int(suite.get(name, "0"))
    bad = counts["failures"] + counts["errors"] + counts["skipped"]
    return {**counts, "passed": counts["tests"] - bad}

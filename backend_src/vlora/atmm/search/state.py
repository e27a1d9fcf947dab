"""Stored state of a search, from which an interrupted search resumes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class State:
    """Results of a search so far, in a file with one JSON object per line."""

    path: Path
    # Device and version that the results depend on. A different stamp discards stored results.
    stamp: str
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        if not lines or _parse(lines[0]) != {"stamp": self.stamp}:
            self.path.unlink()
            return
        for line in lines[1:]:
            if entry := _parse(line):  # The last line may be incomplete.
                self.done[entry["key"]] = entry

    def add(self, entry: dict[str, Any]) -> None:
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            if new:
                file.write(json.dumps({"stamp": self.stamp}) + "\n")
            file.write(json.dumps(entry) + "\n")
        self.done[entry["key"]] = entry


def _parse(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {}

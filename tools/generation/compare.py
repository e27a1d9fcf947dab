"""Compare generation runs of the same items.

usage: python -m tools.generation.compare OUT...

It prints one line of a Markdown table for each run's folder, from its report.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vlora.cli.common import run_command


def line(name: str, report: dict[str, Any]) -> str:
    """Return the line of a run in the table."""
    items = report["items"].values()
    attempts = [*report["attempts"], *report["merges"]]
    failed = sum(bool(attempt["broken"]) for attempt in attempts)
    gains = [item["reached"] - item["base"] for item in items if item["reached"] is not None]
    steps = sum(attempt["steps"] for attempt in attempts)
    gain = sum(gains) / len(gains) if gains else 0.0
    return (
        f"| {name} | {len(items)} | {sum(item['kept'] for item in items)} |"
        f" {len(report['adapters'])} | {report['items_per_adapter']} | {gain:+.3f} |"
        f" {len(attempts)} ({failed}) | {steps} |"
    )


def print_table(folders: Sequence[Path]) -> None:
    """Print a table of the runs in these folders. A run without a report has no line."""
    typer.echo(
        "| run | items | promises kept | adapters | items per adapter | mean gain over the base |"
        " attempts and merges (rolled back) | steps |"
    )
    typer.echo("|---|---|---|---|---|---|---|---|")
    for folder in folders:
        if (folder / "report.json").is_file():
            report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
            typer.echo(line(folder.name, report))
        else:
            typer.echo(f"{folder} has no report.json", err=True)


def main(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of finished runs.")
    ],
) -> None:
    """Print a table of generation runs."""
    print_table(folders)


if __name__ == "__main__":
    run_command(main)

"""`vlora adapters generate`: knowledge items to the fewest adapters, offline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from vlora.cli.common import console, print_plain, report_errors
from vlora.errors import Unsupported

if TYPE_CHECKING:
    from vlora.generation.run import Outcome
    from vlora.generation.spec import Spec
    from vlora.generation.trainer import Progress


def generate(
    spec: Annotated[Path, typer.Argument(help="YAML file with the base and the items.")],
    out: Annotated[Path, typer.Option(help="Folder for the adapters.")],
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for the run's state. Default: OUT/.generation."),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Use the paper's own heuristic instead of the options."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the items and show the plan; train nothing.")
    ] = False,
) -> None:
    """Train the fewest adapters that keep the accuracy that every item demands.

    A run that was stopped continues where it was when it is started again with the same arguments.
    The exit status is 1 if a promise is not kept; OUT/report.md says which.
    """
    with report_errors():
        try:
            # Imported here because they import torch and PEFT.
            from vlora.generation.report import write_report
            from vlora.generation.run import generate as run
            from vlora.generation.run import load_splits
            from vlora.generation.spec import PAPER, read_spec
        except ImportError as error:
            raise Unsupported(
                f"generating adapters needs {error.name}: pip install 'vlora[train]'"
            ) from error
        wanted = read_spec(spec)
        if dry_run:
            _print_plan(wanted, {name: len(s.train) for name, s in load_splits(wanted).items()})
            return
        options = PAPER if paper else wanted.options
        out.mkdir(parents=True, exist_ok=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        started = time.monotonic()
        with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
            items = bars.add_task("items", total=len(wanted.items), note="")
            steps = bars.add_task("starting", total=wanted.training.max_steps, note="")

            def report(progress: Progress) -> None:
                onto = f"onto {progress.adapter}" if progress.adapter else "alone"
                scores = " ".join(f"{name} {score:.2f}" for name, score in progress.scores.items())
                text = f"{escape(progress.item)} {onto}"
                bars.update(steps, description=text, completed=progress.step, note=scores)
                if not console.is_terminal:
                    print_plain(f"{text}: step {progress.step}/{progress.max_steps}: {scores}")

            def decided(done: int, adapters: int) -> None:
                left = (time.monotonic() - started) / max(1, done) * (len(wanted.items) - done)
                note = f"{adapters} adapters, about {left / 60:.0f} min left"
                bars.update(items, completed=done, note=note)
                if not console.is_terminal:
                    print_plain(f"{done} of {len(wanted.items)} items in {note}")

            outcome = run(
                wanted,
                options,
                work or out / ".generation",
                out,
                report,
                lambda state: decided(len(wanted.items) - len(state.pending), len(state.adapters)),
            )
        _print_outcome(outcome)
        print_plain(f"report    {write_report(outcome, out)}")
        if outcome.missed:
            raise typer.Exit(1)


def _print_plan(spec: Spec, examples: dict[str, int]) -> None:
    """Print the items and the largest number of training steps that a run can take."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("item", "task", "metric"):
        table.add_column(heading)
    for heading in ("required", "training examples"):
        table.add_column(heading, justify="right")
    for item in spec.items:
        table.add_row(
            item.name, item.task, item.metric, f"{item.required:.3f}", str(examples[item.name])
        )
    console.print(table)
    count, steps = len(spec.items), spec.training.max_steps
    most = count * (count + 1) // 2 if spec.options.fit == "best" else 2 * count
    print_plain(
        f"at least {count} attempts, at most {most}, of up to {steps} steps with"
        f" {spec.training.batch_size} examples each"
    )


def _print_outcome(outcome: Outcome) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("item", "adapter"):
        table.add_column(heading)
    for heading in ("required", "base", "reached"):
        table.add_column(heading, justify="right")
    holders = outcome.holders
    for item in outcome.spec.items:
        reached = outcome.reached.get(item.name)
        table.add_row(
            item.name,
            holders.get(item.name, "-"),
            f"{item.required:.3f}",
            f"{outcome.base[item.name]:.3f}",
            "-" if reached is None else f"{reached:.3f}",
            style="red" if item.name in outcome.missed else "",
        )
    console.print(table)

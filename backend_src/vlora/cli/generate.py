"""`vlora adapters generate`: train the fewest adapters for some knowledge items."""

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

STATUS_SECONDS = 5.0
"""Seconds between two status lines if the output is not a terminal."""


def generate(
    spec: Annotated[Path, typer.Argument(help="YAML file with the base model and the items.")],
    out: Annotated[Path, typer.Option(help="Folder for the adapters.")],
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for the run's state. Default: OUT/.generation."),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Use the paper's heuristic instead of SPEC's options."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the items and show the plan; train nothing.")
    ] = False,
) -> None:
    """Train the fewest adapters that reach the accuracy that every item requires.

    A run that was stopped continues if it is started again with the same arguments. The exit status
    is 1 if an item misses its accuracy; OUT/report.md says which.
    """
    with report_errors():
        try:
            # Imported here because they import torch and PEFT.
            from vlora.generation.optimization import make_accelerator
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
        accelerator = make_accelerator(wanted.training)
        first = accelerator.is_main_process  # Of several processes, only the first prints.
        terminal, lines = first and console.is_terminal, first and not console.is_terminal
        options = PAPER if paper else wanted.options
        out.mkdir(parents=True, exist_ok=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        started = time.monotonic()
        with Bars(*columns, console=console, disable=not terminal) as bars:
            items = bars.add_task("items", total=len(wanted.items), note="")
            steps = bars.add_task("starting", total=wanted.training.max_steps, note="")

            def report(progress: Progress) -> None:
                onto = f"onto {progress.adapter}" if progress.adapter else "alone"
                scores = " ".join(f"{name} {score:.2f}" for name, score in progress.scores.items())
                text = f"{escape(progress.item)} {onto}"
                bars.update(
                    steps,
                    description=text,
                    completed=progress.step,
                    total=progress.max_steps,
                    note=scores,
                )
                if lines:
                    print_plain(f"{text}: step {progress.step}/{progress.max_steps}: {scores}")

            def decided(done: int, adapters: int) -> None:
                left = (time.monotonic() - started) / max(1, done) * (len(wanted.items) - done)
                note = f"{adapters} adapters, about {left / 60:.0f} min left"
                bars.update(items, completed=done, note=note)
                if lines:
                    print_plain(f"{done} of {len(wanted.items)} items in {note}")

            shown = -STATUS_SECONDS

            def status(text: str) -> None:
                nonlocal shown
                bars.update(steps, description=escape(text), completed=0, note="")
                if lines and time.monotonic() - shown >= STATUS_SECONDS:
                    shown = time.monotonic()
                    print_plain(text)

            outcome = run(
                wanted,
                options,
                work or out / ".generation",
                out,
                report,
                lambda state: decided(len(wanted.items) - len(state.pending), len(state.adapters)),
                status,
                accelerator,
            )
        if first:
            _print_outcome(outcome)
            if outcome.left_out:
                print_plain(f"left out  {len(outcome.left_out)} images; the report says why")
            print_plain(f"report    {write_report(outcome, out)}")
        if outcome.missed:
            raise typer.Exit(1)


def _print_plan(spec: Spec, examples: dict[str, int]) -> None:
    """Print the items, and the maximum number of training steps that the run may take."""
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
    count = len(spec.items)
    steps = spec.training.max_steps * (1 + spec.training.restarts)
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

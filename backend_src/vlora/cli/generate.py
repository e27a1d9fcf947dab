"""`vlora adapters generate`: train the fewest adapters for some knowledge items."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from vlora.cli.common import console, counted, make_table, option, print_plain, report_errors
from vlora.errors import InvalidArgument, Unsupported
from vlora.file_names import printable

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vlora.generation.fusion import RunState
    from vlora.generation.run import Outcome
    from vlora.generation.spec import Spec
    from vlora.generation.trainer import Progress


# Minimum number of seconds between two status lines if the output is not a terminal.
STATUS_SECONDS = 5.0


@dataclass
class TimeLeft:
    """Estimates the remaining time from the time per step and the steps per item.

    Only what this process has trained counts, so the estimate also holds for a continued run.

    items: number of items that are not packed yet.
    max_steps: steps of an item until the first one is packed.
    now: present time in seconds.
    step, limit: number of steps of the present attempt so far, and maximum number.
    steps_of_item: number of steps that the present item has taken in all of its attempts.
    """

    items: int
    max_steps: int
    now: float
    packed: int = 0
    steps: int = 0
    seconds: float = 0.0
    step: int = 0
    limit: int = 0
    steps_of_item: int = 0

    def skip(self, now: float) -> None:
        """Do not count the time since the last call of `skip`, `add` or `pack` as training."""
        self.now = now

    def add(self, step: int, limit: int, now: float) -> None:
        """Count the training up to `step` of `limit` in the present attempt."""
        # A step that is not higher than the last one belongs to a new attempt.
        trained = step - self.step if step > self.step else step
        self.step, self.limit = step, limit
        self.steps += trained
        self.steps_of_item += trained
        self.seconds += now - self.now
        self.now = now

    def pack(self, items: int, now: float) -> None:
        """Count the present item as packed, if it was trained, and `items` as left."""
        if self.steps_of_item:
            self.packed += 1
        self.items, self.now = items, now
        self.step = self.limit = self.steps_of_item = 0

    @property
    def estimate(self) -> float | None:
        """Seconds until all items are packed and the present attempt ends; None if unknown."""
        if not self.steps:
            return None
        finished = self.steps - self.steps_of_item
        per_item = finished / self.packed if self.packed else self.max_steps
        if self.items:
            steps = self.items * per_item - min(self.steps_of_item, per_item)
        else:  # Adapters are being merged.
            steps = self.limit - self.step
        return steps * self.seconds / self.steps

    def __str__(self) -> str:
        if (seconds := self.estimate) is None:
            return "time left not known yet"
        return f"about {seconds / 60:.0f} min left" if seconds >= 60 else "less than 1 min left"


class GenerationProgress:
    """Watcher that shows two bars on a terminal, and lines of text elsewhere.

    shown: whether to show anything. Of several processes, only the first does.
    """

    def __init__(self, spec: Spec, *, shown: bool) -> None:
        text = TextColumn("{task.description}", markup=False)
        note = TextColumn("{task.fields[note]}", markup=False)
        columns = (text, BarColumn(), note, TimeElapsedColumn())
        terminal = shown and console.is_terminal
        self._lines = shown and not terminal
        self._bars = Bars(*columns, console=console, disable=not terminal)
        self._count = len(spec.items)
        self._items = self._bars.add_task("items", total=self._count, note="")
        self._steps = self._bars.add_task("starting", total=spec.training.max_steps, note="")
        self._left = TimeLeft(self._count, spec.training.max_steps, time.monotonic())
        self._adapters = 0
        self._last_line = -STATUS_SECONDS

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def report(self, progress: Progress) -> None:
        """Show the accuracies of an evaluation, and the step of the attempt."""
        onto = f"onto {progress.adapter}" if progress.adapter else "alone"
        text = f"{progress.item} {onto}"
        scores = " ".join(f"{name} {score:.2f}" for name, score in progress.scores.items())
        self._bars.update(
            self._steps,
            description=printable(text),
            completed=progress.step,
            total=progress.max_steps,
            note=scores,
        )
        self._left.add(progress.step, progress.max_steps, time.monotonic())
        self._bars.update(self._items, note=self._note)
        if self._lines:
            step = f"step {progress.step}/{progress.max_steps}"
            print_plain(f"{text}: {step}: {scores}; {self._left}")

    def decided(self, state: RunState) -> None:
        """Show the number of items that are decided, and the number of adapters."""
        self._adapters = len(state.adapters)
        self._left.pack(len(state.pending), time.monotonic())
        done = self._count - len(state.pending)
        self._bars.update(self._items, completed=done, note=self._note)
        if self._lines:
            print_plain(f"{done} of {self._count} items in {self._note}")

    def status(self, text: str) -> None:
        """Show what the run does between attempts."""
        now = time.monotonic()
        self._left.skip(now)
        self._bars.update(self._steps, description=printable(text), completed=0, note="")
        if self._lines and now - self._last_line >= STATUS_SECONDS:
            self._last_line = now
            print_plain(text)

    @property
    def _note(self) -> str:
        return f"{counted(self._adapters, 'adapter')}, {self._left}"


SpecFile = Annotated[Path, typer.Argument(help="YAML file with the base model and the items.")]
Out = Annotated[Path, option("FOLDER", "Folder for the adapters.")]
Work = Annotated[
    Path | None, option("FOLDER", "Folder for the run's state. Default: OUT/.generation.")
]
Paper = Annotated[
    bool, option(None, "Use the paper's heuristic instead of SPEC's options.", "--paper")
]
DryRun = Annotated[
    bool, option(None, "Check the items and show the plan; train nothing.", "--dry-run")
]


def generate(
    spec: SpecFile, out: Out, work: Work = None, paper: Paper = False, dry_run: DryRun = False
) -> None:
    """Train the fewest adapters that reach the accuracy that every item requires.

    A run that was stopped continues if it is started again with the same
    arguments. The exit status is 1 if an item misses its accuracy; OUT/report.md
    says which.
    """
    with report_errors():
        try:
            from vlora.generation.spec import read_spec

            wanted = read_spec(spec)
            # Imported after the check of the specification because they import torch and PEFT.
            from vlora.generation.run import load_splits
            from vlora.generation.trainer import make_accelerator
        except ImportError as error:
            raise Unsupported(
                f"generating adapters needs {error.name}: pip install 'vlora[train]'"
            ) from error
        if dry_run:
            _print_plan(wanted, {name: len(s.train) for name, s in load_splits(wanted).items()})
            return
        accelerator = make_accelerator(wanted.training)
        outcome = _run(wanted, out, work or out / ".generation", paper, accelerator)
        if accelerator.is_main_process:
            _report(outcome, out)
        if outcome.missed:
            raise typer.Exit(1)


def _run(spec: Spec, out: Path, work: Path, paper: bool, accelerator: Accelerator) -> Outcome:
    from vlora.generation.run import generate as run
    from vlora.generation.spec import PAPER

    for folder in (out, work):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{folder} cannot be made: {error.strerror}") from None
    first = accelerator.is_main_process  # Of several processes, only the first prints.
    options = PAPER if paper else spec.options
    try:
        with GenerationProgress(spec, shown=first) as progress:
            return run(spec, options, work, out, progress, accelerator)
    except KeyboardInterrupt:
        if first:
            print_plain("stopped; to continue, start the same command again")
        raise typer.Exit(130) from None


def _report(outcome: Outcome, out: Path) -> None:
    from vlora.generation.report import write_report

    _print_outcome(outcome)
    for name, error in outcome.uncertain.items():
        tests = counted(outcome.tests[name], "test example")
        print_plain(f"warning   {name}: {tests}; accuracies have a standard error of {error:.2f}")
    if outcome.left_out:
        print_plain(f"left out  {counted(len(outcome.left_out), 'image')}; the report says why")
    print_plain(f"report    {write_report(outcome, out)}")
    for name, score in outcome.missed.items():
        required = outcome.spec.item(name).required
        print_plain(f"missed    {name}: {score:.3f} of the required {required:.3f}")


def _print_plan(spec: Spec, examples: dict[str, int]) -> None:
    right = ("required", "training examples")
    table = make_table(("item", "task", "metric", *right), right)
    for item in spec.items:
        number = str(examples[item.name])
        table.add_row(item.name, item.task, item.metric, f"{item.required:.3f}", number)
    console.print(table)
    count = len(spec.items)
    steps = spec.training.max_steps * (1 + spec.training.restarts)
    most = count * (count + 1) // 2 if spec.options.fit == "best" else 2 * count
    attempts = counted(most, "attempt")
    number = attempts if most == count else f"at least {count} and at most {attempts}"
    print_plain(f"{number} of up to {steps} steps with {spec.training.batch_size} examples each")


def _print_outcome(outcome: Outcome) -> None:
    right = ("required", "base", "reached")
    table = make_table(("item", "adapter", *right), right)
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

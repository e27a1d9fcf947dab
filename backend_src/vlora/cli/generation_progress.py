"""Progress of a generation run: two bars on a terminal, and lines of text elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from vlora.cli.common import console, counted, print_plain
from vlora.generation.time_left import TimeLeft

if TYPE_CHECKING:
    from vlora.generation.fusion import RunState
    from vlora.generation.spec import Spec
    from vlora.generation.trainer import Progress

STATUS_SECONDS = 5.0
"""Minimum number of seconds between two status lines if the output is not a terminal."""


class GenerationProgress:
    """Display of the number of items that are decided, the present attempt and the time left.

    Its methods are the callbacks of `vlora.generation.run.generate`.
    """

    def __init__(self, spec: Spec, *, shown: bool) -> None:
        """Create the progress display.

        shown: whether to show anything. Of several processes, only the first does.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def report(self, progress: Progress) -> None:
        """Show the accuracies of an evaluation, and the step of the attempt."""
        onto = f"onto {progress.adapter}" if progress.adapter else "alone"
        text = f"{progress.item} {onto}"
        scores = " ".join(f"{name} {score:.2f}" for name, score in progress.scores.items())
        self._bars.update(
            self._steps,
            description=escape(text),
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
        self._bars.update(self._steps, description=escape(text), completed=0, note="")
        if self._lines and now - self._last_line >= STATUS_SECONDS:
            self._last_line = now
            print_plain(text)

    @property
    def _note(self) -> str:
        return f"{counted(self._adapters, 'adapter')}, {self._left}"

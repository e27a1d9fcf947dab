"""Run stages in sequence, each as a process with a time limit, and record how each ended.

A stage that fails, hangs or lacks a program does not stop the others. Completed stages do not run
again. This module does not depend on a GPU and uses only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
LACKING = 3
"""Exit status of a stage that lacks a program or a device. Its last output line names what is
missing.
"""
FEWEST_SECONDS = 2.0
"""Minimum time left to start another stage."""

Ending = Literal["done", "failed", "out of time", "lacking", "not started"]


class Lacking(Exception):
    """Raised by a stage if a program or a device is missing. The message says how to get it."""


@dataclass(frozen=True)
class Stage:
    """A process to run.

    seconds: time limit of the process.
    always: whether the stage runs again although it was completed.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    always: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a stage: how it ended, its duration in seconds, and its last output line."""

    ending: Ending
    seconds: float
    says: str


class Runner:
    """Runner of stages. Their state is in `folder`/stages.json, their output in `folder`/NAME.log.

    stamp: hash of what the results depend on. If it differs from the stored one, all stages run.
    """

    def __init__(
        self, folder: Path, stamp: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._stamp, self._clock = folder, stamp, clock
        self._state = folder / "stages.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, Outcome] = {}
        if self._state.exists():
            known = json.loads(self._state.read_text())
            if known["stamp"] == stamp:
                self.outcomes = {name: Outcome(**one) for name, one in known["stages"].items()}

    def run(
        self,
        stages: Sequence[Stage],
        seconds: float,
        environment: Mapping[str, str],
        tell: Callable[[str], None] = print,
        after: Callable[[], object] = lambda: None,
    ) -> dict[str, Outcome]:
        """Run all stages within `seconds`.

        after: called after each stage. An error in it is reported and does not stop the run.

        A stage may run longer than its own limit, as long as the limits of all later stages still
        fit into the remaining time.
        """
        end = self._clock() + seconds
        for i, stage in enumerate(stages):
            known = self.outcomes.get(stage.name)
            if known is not None and known.ending == "done" and not stage.always:
                tell(f"{stage.name}: completed before ({known.says})")
                continue
            promised = sum(later.seconds for later in stages[i + 1 :])
            box = max(stage.seconds, end - self._clock() - promised)
            box = min(box, end - self._clock())
            if box < FEWEST_SECONDS:
                outcome = Outcome("not started", 0.0, "no time was left")
            else:
                tell(f"{stage.name}: at most {box:.0f} s")
                outcome = self._run(stage, box, environment)
            self.outcomes[stage.name] = outcome
            self._save()
            tell(f"{stage.name}: {outcome.ending} after {outcome.seconds:.0f} s: {outcome.says}")
            try:
                after()
            except Exception as error:
                tell(f"the report after {stage.name} failed: {type(error).__name__}: {error}")
        return self.outcomes

    def _run(self, stage: Stage, box: float, environment: Mapping[str, str]) -> Outcome:
        log = self._folder / f"{stage.name}.log"
        started = self._clock()
        with log.open("w") as output:
            process = subprocess.Popen(
                stage.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment, "VLORA_GPU_SECONDS": f"{box:.1f}"},
                start_new_session=True,  # Its child processes end with it.
            )
            try:
                status = process.wait(box)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        seconds = self._clock() - started
        says = _last_line(log)
        if status is None:
            return Outcome("out of time", seconds, says)
        ending: Ending = "done" if status == 0 else "lacking" if status == LACKING else "failed"
        return Outcome(ending, seconds, says if status in (0, LACKING) else f"{says} ({status})")

    def _save(self) -> None:
        draft = self._state.with_suffix(".draft")
        stages = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        draft.write_text(json.dumps({"stamp": self._stamp, "stages": stages}, indent=1) + "\n")
        draft.replace(self._state)


def seconds_given() -> float:
    """Return the time limit in seconds of the stage that this process runs."""
    return float(os.environ.get("VLORA_GPU_SECONDS", "3600"))


def table(outcomes: Mapping[str, Outcome]) -> str:
    rows = [("stage", "ended", "s", "says")]
    rows += [(name, o.ending, f"{o.seconds:.0f}", o.says) for name, o in outcomes.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def stage_main(work: Callable[[], str]) -> None:
    """Run a stage's work, print its result line, and exit with the status the runner expects."""
    try:
        print(work(), flush=True)
    except Lacking as missing:
        print(str(missing).replace("\n", " "), flush=True)
        sys.exit(LACKING)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"

"""Runs stages one after another, each a process with a time box, and remembers how each ended.

A stage that fails, hangs or lacks something does not stop the others; one that was done is not run
again. Knows processes and clocks; nothing of GPUs. Standard library only.
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

LACKING = 3
"""Exit status of a stage that something is missing for; its last line says what."""
FEWEST_SECONDS = 2.0
"""A stage is not started with less left."""

Ending = Literal["done", "failed", "out of time", "lacking", "not started"]


class Lacking(Exception):
    """What a stage misses, and how to get it."""


@dataclass(frozen=True)
class Stage:
    """One process. seconds: its time box. again: run it even if it was done before."""

    name: str
    command: tuple[str, ...]
    seconds: float
    again: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a stage ended, after how long, and its last words."""

    ending: Ending
    seconds: float
    says: str


class Runner:
    """State lies in `folder`/stages.json, the output of each stage in `folder`/NAME.log.

    stamp: what the results depend on (sources, machine); with another one nothing counts as done.
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
    ) -> dict[str, Outcome]:
        """All stages within `seconds`. What a stage leaves of its box is the later ones' to use:
        a box is a promise to those that follow, not a limit of its own."""
        end = self._clock() + seconds
        for i, stage in enumerate(stages):
            known = self.outcomes.get(stage.name)
            if known is not None and known.ending == "done" and not stage.again:
                tell(f"{stage.name}: done before ({known.says})")
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
                start_new_session=True,  # what it starts ends with it
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
    """Of the time box of the stage that this process is."""
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
    """Run a stage's work and leave as the runner expects: its last line says what came of it."""
    try:
        print(work(), flush=True)
    except Lacking as missing:
        print(str(missing).replace("\n", " "), flush=True)
        sys.exit(LACKING)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"

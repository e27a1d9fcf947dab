"""Generation runs, from the examples to the adapter folders.

The run's folder contains everything that a killed run needs to continue: `state.json`, which is
replaced after each decision, and the weights of each attempt.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

from vlora.adapters.routing import usual_words
from vlora.atomic_file import apply_umask, replace_text
from vlora.errors import InvalidArgument
from vlora.generation.examples import Splits, read_examples, split
from vlora.generation.fusion import Goals, Packed, RunState, fuse_next, merge_next, similar_order
from vlora.generation.learner import HEAD_STATE
from vlora.generation.spec import PackingOptions, Spec
from vlora.generation.teachers import load_teacher, read_truth, remembered, teacher_score
from vlora.generation.trainer import PeftTrainer, Progress, make_accelerator
from vlora.offline.peft_folder import rename_base

STATE = "state.json"
NAMED_ITEMS = 3  # Maximum number of items in the name of an adapter.
# Standard error of a test accuracy above which a promise is called uncertain.
MAX_ERROR = 0.05


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    goals: goal of each item on the validation split.
    base, reached: accuracy of each item on the test split, of the base model and of its adapter.
    teachers: accuracy of the teachers on the test split, where the right answers are known.
    tests: number of test examples of each item.
    left_out: reason for each image that was not used.
    folders: folder of each adapter by number.
    """

    spec: Spec
    options: PackingOptions
    state: RunState
    goals: Goals
    base: Mapping[str, float]
    reached: Mapping[str, float]
    teachers: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    folders: Mapping[int, Path] = field(default_factory=dict)
    tests: Mapping[str, int] = field(default_factory=dict)

    @property
    def holders(self) -> dict[str, str]:
        """Name of the adapter folder that contains each item."""
        return {
            item: folder_name(self.spec, adapter)
            for adapter in self.state.adapters
            for item in adapter.items
        }

    @property
    def missed(self) -> dict[str, float]:
        """Accuracy of each item that misses the required accuracy, by name.

        It is measured on the test split; for an item without an adapter, on the validation split.
        """
        required = {item.name: item.required for item in self.spec.items}
        below = {name: score for name, score in self.reached.items() if score < required[name]}
        return {**self.state.unreachable, **below}

    @property
    def uncertain(self) -> dict[str, float]:
        """Standard error, if it is above MAX_ERROR, of a test accuracy that equals the promise."""
        errors = {
            item.name: math.sqrt(item.required * (1 - item.required) / self.tests[item.name])
            for item in self.spec.items
        }
        return {name: error for name, error in errors.items() if error > MAX_ERROR}


def load_splits(
    spec: Spec,
    work: Path | None = None,
    status: Callable[[str], None] = lambda _: None,
    left_out: Callable[[str], None] = lambda _: None,
) -> dict[str, Splits]:
    """Return the examples of all items, labelled by their teachers and split.

    work: folder in which the teachers' answers are stored; None to store none.
    left_out: called with the reason for each image that is not used.
    """
    splits = {}
    for item in spec.items:
        status(f"reading {item.name}")
        teacher = load_teacher(item)
        if teacher is not None and work is not None:
            with remembered(item, teacher, work / f"labels-{item.name}.json", status) as label:
                examples = read_examples(item, label, left_out)
        else:
            examples = read_examples(item, teacher, left_out)
        splits[item.name] = split(item, examples, spec.split, spec.seed)
    return splits


class _Journal:
    """The file from which a killed run continues.

    writes: whether this process writes the file. Of several processes, only the first does.
    """

    def __init__(self, spec: Spec, options: PackingOptions, work: Path, writes: bool) -> None:
        self.path = work / STATE
        self.settings = spec.model_dump(mode="json", exclude={"items", "options", "prefix"})
        self.settings["options"] = options.model_dump()
        # Items may be added, but not changed.
        self.items = {item.name: item.model_dump(mode="json") for item in spec.items}
        self.writes = writes
        self.base: dict[str, float] = {}  # Accuracy of the base model on the test split.
        self.written: list[str] = []  # Names of the adapter folders.

    def read(self) -> RunState | None:
        """Return the saved state with new items added to `pending`; None if no state was saved."""
        if not self.path.is_file():
            return None
        saved = json.loads(self.path.read_text(encoding="utf-8"))
        changed = [key for key, value in self.settings.items() if saved["settings"][key] != value]
        changed += [f"item '{n}'" for n, old in saved["items"].items() if self.items.get(n) != old]
        if changed:
            raise InvalidArgument(
                f"{self.path.parent} holds a run with another {changed[0]}; name another --work"
                " folder, or remove it"
            )
        self.base.update(saved["base"])
        self.written += saved["written"]
        state = RunState.from_json(saved["state"])
        new = [name for name in self.items if name not in saved["items"]]
        return replace(state, pending=(*state.pending, *new))

    def write(self, state: RunState) -> None:
        if not self.writes:
            return
        content = {
            "settings": self.settings,
            "items": self.items,
            "base": self.base,
            "written": self.written,
            "state": state.as_json(),
        }
        replace_text(self.path, json.dumps(content, indent=2) + "\n")


class Watcher(Protocol):
    """Receives the progress of a run."""

    def report(self, progress: Progress) -> None:
        """Take the result of an evaluation."""

    def decided(self, state: RunState) -> None:
        """Take the state before the first decision and after each one."""

    def status(self, text: str) -> None:
        """Take what the run does next, other than attempts."""


class Unwatched:
    """A watcher that ignores everything."""

    def report(self, progress: Progress) -> None:
        pass

    def decided(self, state: RunState) -> None:
        pass

    def status(self, text: str) -> None:
        pass


def generate(
    spec: Spec,
    options: PackingOptions,
    work: Path,
    out: Path,
    watcher: Watcher | None = None,
    accelerator: Accelerator | None = None,
) -> Outcome:
    """Start or continue a generation run and write the adapter folders.

    If items were added to the specification of a finished run, the run is extended.

    work: folder of the run's state.
    out: folder for the adapters. Folders of the same run in it are replaced.

    Raises InvalidArgument for examples that cannot be used, and if `work` contains another run.
    """
    work.mkdir(parents=True, exist_ok=True)
    watcher = watcher or Unwatched()
    accelerator = accelerator or make_accelerator(spec.training)
    left_out: list[str] = []
    with accelerator.main_process_first():  # Others then read the teachers' answers.
        splits = load_splits(spec, work, watcher.status, left_out.append)
    teachers = _teacher_scores(spec, splits)
    trainer = PeftTrainer(spec, options, splits, work, accelerator, watcher.report)
    journal = _Journal(spec, options, work, accelerator.is_main_process)
    saved = journal.read()
    _check_output(spec, out, journal.written)
    accelerator.wait_for_everyone()
    state = saved or RunState(tuple(item.name for item in spec.items))
    state = _measured_and_ordered(state, trainer, journal, watcher)
    state = _packed(state, trainer, journal, watcher)
    reached: dict[str, float] = {}
    watcher.status("measuring the accuracy of the adapters on the test split")
    for adapter in state.adapters:
        reached |= trainer.packed_scores(adapter, "test")
    folders = {adapter.number: out / folder_name(spec, adapter) for adapter in state.adapters}
    if accelerator.is_main_process:
        for name in journal.written:
            shutil.rmtree(out / name, ignore_errors=True)
        journal.written = [folder.name for folder in folders.values()]
        journal.write(state)
        for adapter in state.adapters:
            _write_folder(trainer, adapter, reached, folders[adapter.number])
    accelerator.wait_for_everyone()
    tests = {name: len(one.test) for name, one in splits.items()}
    settings = (spec, options, state, trainer.goals)
    return Outcome(*settings, journal.base, reached, teachers, tuple(left_out), folders, tests)


def _measured_and_ordered(
    state: RunState, trainer: PeftTrainer, journal: _Journal, watcher: Watcher
) -> RunState:
    new = [item for item in trainer.spec.items if item.name not in journal.base]
    watcher.status("measuring the base model's accuracy")
    journal.base.update(trainer.base_scores(new, "test"))
    if trainer.options.order == "gradient" or trainer.options.fit == "best":
        watcher.status("comparing the items' gradients")
        trainer.compare()
    state = replace(state, pending=_ordered(state.pending, trainer))
    journal.write(state)
    watcher.decided(state)
    return state


def _packed(state: RunState, trainer: PeftTrainer, journal: _Journal, watcher: Watcher) -> RunState:
    spec, options = trainer.spec, trainer.options
    while state.pending:
        state = fuse_next(spec, options, trainer.goals, state, trainer, journal.write)
        journal.write(state)
        watcher.decided(state)
    if options.merge != "none":
        watcher.status("merging adapters")
        while merged := merge_next(spec, options, trainer.goals, state, trainer):
            state = merged
            journal.write(state)
    return state


def _teacher_scores(spec: Spec, splits: Mapping[str, Splits]) -> dict[str, float]:
    scores = {
        one.name: teacher_score(one, splits[one.name].test, read_truth(one)) for one in spec.items
    }
    return {name: score for name, score in scores.items() if score is not None}


def _ordered(pending: tuple[str, ...], trainer: PeftTrainer) -> tuple[str, ...]:
    # A run that was stopped and continued gets the same order again.
    listed = [item.name for item in trainer.spec.items]
    if trainer.options.order == "random":
        random.Random(trainer.spec.seed).shuffle(listed)
    elif trainer.options.order == "gradient":
        listed = list(similar_order(listed, lambda a, b: trainer.similarities[a].get(b, 0.0)))
    return tuple(name for name in listed if name in pending)


def _check_output(spec: Spec, out: Path, written: Sequence[str]) -> None:
    """Raise InvalidArgument if this run would replace a folder in `out` that it has not written."""
    ours = re.compile(rf"{re.escape(spec.prefix)}-\d+(-.*)?")
    for folder in out.iterdir() if out.is_dir() else ():
        if ours.fullmatch(folder.name) and folder.name not in written:
            raise InvalidArgument(
                f"{folder} was not written by this run; choose another prefix or --out folder"
            )


def folder_name(spec: Spec, adapter: Packed) -> str:
    """Return the name of an adapter's folder, under which it is served: its number and items."""
    more = len(adapter.items) - NAMED_ITEMS
    names = [*adapter.items[:NAMED_ITEMS], *([f"and-{more}-more"] if more > 0 else [])]
    return "-".join([spec.prefix, str(adapter.number), *names])


def _write_folder(
    trainer: PeftTrainer, adapter: Packed, reached: Mapping[str, float], folder: Path
) -> None:
    spec = trainer.spec
    items = [spec.item(name) for name in adapter.items]
    trained = trainer.folder(adapter.version)
    part = trained.with_name(folder.name)
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(trained, part, ignore=shutil.ignore_patterns(HEAD_STATE))
    rename_base(part, spec.base.name)
    about: dict[str, Any] = {
        "tasks": sorted({item.task for item in items}),
        "default_task": Counter(item.task for item in items).most_common(1)[0][0],
        "accuracy": {item.name: round(reached[item.name], 4) for item in items},
    }
    about["skills"] = [
        {
            "name": item.name,
            "task": item.task,
            "accuracy": about["accuracy"][item.name],
            "words": usual_words([one.question for one in trainer.splits[item.name].train]),
        }
        for item in items
    ]
    if labels := trainer.labels(items):
        tasks = sorted({item.task for item in items if item.head})
        about["head"] = {"labels": labels, "tasks": tasks}
    (part / "vlora.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    apply_umask(part)
    shutil.move(part, folder)

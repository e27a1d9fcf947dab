"""A generation run: examples, base accuracy, fusion, final evaluation, adapter folders, report.

The run's folder holds everything that a killed run needs to continue: `state.json`, replaced after
each decision, and the weights of each attempt.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlora.atomic_file import replace_text
from vlora.errors import InvalidArgument
from vlora.generation.examples import Splits, read_examples, split
from vlora.generation.fusion import Packed, State, fuse_next, merge_next, similar_order
from vlora.generation.learner import HEAD_STATE
from vlora.generation.peft_folder import rename_base
from vlora.generation.similarity import similarities
from vlora.generation.spec import Options, Spec
from vlora.generation.teachers import load_teacher, remembered
from vlora.generation.trainer import PeftTrainer, Progress

STATE = "state.json"


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    base: accuracy of the base by item, on the test split.
    reached: accuracy by item on the test split, of the adapter that holds it.
    folders: folder of each adapter by its number.
    """

    spec: Spec
    options: Options
    state: State
    base: Mapping[str, float]
    reached: Mapping[str, float]
    folders: Mapping[int, Path] = field(default_factory=dict)

    @property
    def holders(self) -> dict[str, str]:
        """Name of the adapter folder that holds each item, by item."""
        return {
            item: folder_name(self.spec, adapter)
            for adapter in self.state.adapters
            for item in adapter.items
        }

    @property
    def missed(self) -> dict[str, float]:
        """Accuracy of each item whose promise is not kept on the test split."""
        missed = dict(self.state.unreachable)
        for name, score in self.reached.items():
            if score < self.spec.item(name).required:
                missed[name] = score
        return missed


def load_splits(spec: Spec, work: Path | None = None) -> dict[str, Splits]:
    """Return the examples of all items, labelled by their teachers and split.

    work: folder that keeps the teachers' answers; without it they are not kept.
    """
    splits = {}
    for item in spec.items:
        teacher = load_teacher(item)
        if teacher is not None and work is not None:
            with remembered(item, teacher, work / f"labels-{item.name}.json") as label:
                examples = read_examples(item, label)
        else:
            examples = read_examples(item, teacher)
        splits[item.name] = split(item, examples, spec.split, spec.seed)
    return splits


@dataclass
class _Journal:
    """The file that a killed run continues from.

    settings: what decides the results apart from the items; an item may be added, not changed.
    base: accuracy of the base by item on the test split.
    written: names of the adapter folders that the run has written.
    """

    path: Path
    settings: Mapping[str, Any]
    items: Mapping[str, Any]
    base: dict[str, float] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def read(self) -> State | None:
        """Return the saved state, with new items pending; None if there is none.

        Raises InvalidArgument if the run had other settings or an item that was changed since.
        """
        if not self.path.is_file():
            return None
        saved = json.loads(self.path.read_text(encoding="utf-8"))
        changed = [key for key, value in self.settings.items() if saved["settings"][key] != value]
        changed += [
            f"item '{n}'" for n, value in saved["items"].items() if self.items.get(n) != value
        ]
        if changed:
            raise InvalidArgument(
                f"{self.path.parent} holds a run with another {changed[0]}; name another --work"
                " folder, or remove it"
            )
        self.base.update(saved["base"])
        self.written += saved["written"]
        state = State.from_json(saved["state"])
        new = [name for name in self.items if name not in saved["items"]]
        return replace(state, pending=(*state.pending, *new))

    def write(self, state: State) -> None:
        """Replace the file atomically."""
        content = {
            "settings": self.settings,
            "items": self.items,
            "base": self.base,
            "written": self.written,
            "state": state.as_json(),
        }
        replace_text(self.path, json.dumps(content, indent=2) + "\n")


def generate(
    spec: Spec,
    options: Options,
    work: Path,
    out: Path,
    report: Callable[[Progress], None] = lambda _: None,
    decided: Callable[[State], None] = lambda _: None,
) -> Outcome:
    """Run or continue a generation run and write the adapter folders.

    A finished run whose specification has got more items is extended: its adapters stay, and the
    new items are fused into them or get adapters of their own.

    work: folder of the run's state.
    out: adapter root; the run's folders in it are replaced.
    report: called after each evaluation. decided: called after each decision.

    Raises InvalidArgument for examples that cannot be used, and if `work` holds another run.
    """
    work.mkdir(parents=True, exist_ok=True)
    splits = load_splits(spec, work)
    trainer = PeftTrainer(spec, options, splits, work, report)
    settings = spec.model_dump(mode="json", exclude={"items", "options", "prefix"})
    journal = _Journal(
        work / STATE,
        {**settings, "options": options.model_dump()},
        {item.name: item.model_dump(mode="json") for item in spec.items},
    )
    saved = journal.read()
    _check_output(spec, out, journal.written)
    state = saved or State(tuple(item.name for item in spec.items))
    new = [item for item in spec.items if item.name not in journal.base]
    journal.base.update(trainer.base_scores(new, "test"))
    if options.order == "gradient" or options.fit == "best":
        trainer.similarities = similarities(
            trainer.base, spec.training, spec.items, splits, spec.seed
        )
    state = replace(state, pending=_ordered(state.pending, spec, options, trainer))
    journal.write(state)
    while state.pending:
        state = fuse_next(spec, options, state, trainer, journal.write)
        journal.write(state)
        decided(state)
    if options.merge != "none":
        while (merged := merge_next(spec, state, trainer)) is not None:
            state = merged
            journal.write(state)
    reached: dict[str, float] = {}
    for adapter in state.adapters:
        reached |= trainer.packed_scores(adapter, "test")
    for name in journal.written:
        shutil.rmtree(out / name, ignore_errors=True)
    journal.written = [folder_name(spec, adapter) for adapter in state.adapters]
    journal.write(state)
    folders = {
        adapter.number: _write_folder(spec, adapter, trainer, reached, out)
        for adapter in state.adapters
    }
    return Outcome(spec, options, state, journal.base, reached, folders)


def _ordered(
    pending: tuple[str, ...], spec: Spec, options: Options, trainer: PeftTrainer
) -> tuple[str, ...]:
    """Return the pending items in the order of the options, which does not depend on how often the
    run was stopped."""
    listed = [item.name for item in spec.items]
    if options.order == "random":
        random.Random(spec.seed).shuffle(listed)
    elif options.order == "gradient":
        listed = list(similar_order(listed, lambda a, b: trainer.similarities[a].get(b, 0.0)))
    return tuple(name for name in listed if name in pending)


def _check_output(spec: Spec, out: Path, written: Sequence[str]) -> None:
    """Raise InvalidArgument if `out` has a folder of another run that this one might replace."""
    for number in range(1, len(spec.items) + 1):
        name = f"{spec.prefix}-{number}"
        if (out / name).exists() and name not in written:
            raise InvalidArgument(
                f"{out / name} is not of this run; choose another prefix or another --out folder"
            )


def folder_name(spec: Spec, adapter: Packed) -> str:
    """Return the name under which an adapter is written and served."""
    return f"{spec.prefix}-{adapter.number}"


def _write_folder(
    spec: Spec, adapter: Packed, trainer: PeftTrainer, reached: Mapping[str, float], out: Path
) -> Path:
    """Write one adapter's folder as the server reads it, and return it."""
    items = [spec.item(name) for name in adapter.items]
    folder = out / folder_name(spec, adapter)
    part = trainer.folder(adapter.version).with_name(folder.name)
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(
        trainer.folder(adapter.version), part, ignore=shutil.ignore_patterns(HEAD_STATE)
    )
    rename_base(part, spec.base.name)
    about: dict[str, Any] = {
        "tasks": sorted({item.task for item in items}),
        "accuracy": {item.name: round(reached[item.name], 4) for item in items},
    }
    if labels := trainer.labels(items):
        tasks = sorted({item.task for item in items if item.head})
        about["head"] = {"labels": labels, "tasks": tasks}
    (part / "vlora.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.move(part, folder)
    return folder

"""A generation run: examples, base accuracy, fusion, final evaluation, adapter folders, report.

The run's folder holds everything that a killed run needs to continue: `state.json`, replaced after
each decision, and the weights of each attempt.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlora.errors import InvalidArgument
from vlora.generation.examples import Splits, read_examples, split
from vlora.generation.fusion import Packed, State, fuse_next
from vlora.generation.learner import HEAD_STATE
from vlora.generation.spec import Options, Spec
from vlora.generation.teachers import load_teacher
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
    def missed(self) -> dict[str, float]:
        """Accuracy of each item whose promise is not kept on the test split."""
        missed = dict(self.state.unreachable or {})
        for name, score in self.reached.items():
            if score < self.spec.item(name).required:
                missed[name] = score
        return missed


def load_splits(spec: Spec) -> dict[str, Splits]:
    """Return the examples of all items, labelled by their teachers and split."""
    return {
        item.name: split(item, read_examples(item, load_teacher(item)), spec.split, spec.seed)
        for item in spec.items
    }


def fingerprint(spec: Spec, options: Options) -> str:
    """Return a hash of what decides a run's results, apart from the files' contents."""
    content = json.dumps([spec.model_dump(mode="json"), options.model_dump()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def generate(
    spec: Spec,
    options: Options,
    work: Path,
    out: Path,
    report: Callable[[Progress], None] = lambda _: None,
    decided: Callable[[State], None] = lambda _: None,
) -> Outcome:
    """Run or continue a generation run and write the adapter folders.

    work: folder of the run's state; a run with another specification in it is refused.
    out: adapter root; the run's folders in it are replaced.
    report: called after each evaluation. decided: called after each item.

    Raises InvalidArgument for examples that cannot be used, and for a foreign `work`.
    """
    splits = load_splits(spec)
    trainer = PeftTrainer(spec, options, splits, work, {}, report)
    state, base = _start(spec, options, work, trainer)
    while state.pending:
        state = fuse_next(
            spec, options, state, trainer, lambda s: _save(work, spec, options, s, base)
        )
        _save(work, spec, options, state, base)
        decided(state)
    reached: dict[str, float] = {}
    for adapter in state.adapters:
        reached |= trainer.packed_scores(adapter, "test")
    folders = {
        adapter.number: _write_folder(spec, adapter, trainer, reached, out)
        for adapter in state.adapters
    }
    return Outcome(spec, options, state, base, reached, folders)


def _start(
    spec: Spec, options: Options, work: Path, trainer: PeftTrainer
) -> tuple[State, dict[str, float]]:
    """Return the saved state and the base's accuracy, or those of a new run."""
    path = work / STATE
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["fingerprint"] != fingerprint(spec, options):
            raise InvalidArgument(
                f"{work} holds a run with another specification; name another --work folder"
            )
        return State.from_json(saved["state"]), saved["base"]
    base = trainer.base_scores(spec.items, "test")
    state = State(pending=tuple(item.name for item in spec.items))
    work.mkdir(parents=True, exist_ok=True)
    _save(work, spec, options, state, base)
    return state, base


def _save(
    work: Path, spec: Spec, options: Options, state: State, base: Mapping[str, float]
) -> None:
    """Replace the state file atomically."""
    content: dict[str, Any] = {
        "fingerprint": fingerprint(spec, options),
        "base": dict(base),
        "state": state.as_json(),
    }
    part = work / (STATE + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(work / STATE)


def _write_folder(
    spec: Spec, adapter: Packed, trainer: PeftTrainer, reached: Mapping[str, float], out: Path
) -> Path:
    """Write one adapter's folder as the server reads it, and return it."""
    items = [spec.item(name) for name in adapter.items]
    folder = out / f"{spec.prefix}-{adapter.number}"
    part = out / f".{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(
        trainer.folder(adapter.version), part, ignore=shutil.ignore_patterns(HEAD_STATE)
    )
    config = json.loads((part / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = spec.base.name
    text = json.dumps(config, indent=2, sort_keys=True)
    (part / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    about: dict[str, Any] = {
        "tasks": sorted({item.task for item in items}),
        "accuracy": {item.name: round(reached[item.name], 4) for item in items},
    }
    if labels := trainer.labels(items):
        tasks = sorted({item.task for item in items if item.head})
        about["head"] = {"labels": labels, "tasks": tasks}
    (part / "vlora.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder

"""Test of the generator on the tiny checkpoint: PEFT gives the answers of the run's evaluation."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.oracle import Oracle
from tools.generation.served import question
from vlora.adapters.files import WEIGHTS, load_adapter
from vlora.errors import InvalidArgument
from vlora.generation.fusion import Packed, RunState
from vlora.generation.learner import Learner
from vlora.generation.report import as_json, write_report
from vlora.generation.run import Outcome, Unwatched, generate, load_splits
from vlora.generation.spec import read_spec
from vlora.generation.trainer import PeftTrainer, Progress
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape

COLOURS = {"red": (200, 20, 20), "blue": (20, 20, 200), "green": (20, 160, 20)}
UMASK = os.umask(0o022)
os.umask(UMASK)
TRAINING = {"max_steps": 24, "evaluate_every": 8, "batch_size": 12, "rank": 4, "margin": 0.0}


class Killer(Unwatched):
    """Interrupts a run at its `number`-th evaluation."""

    def __init__(self, number: int) -> None:
        self._left = number

    def report(self, progress: Progress) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _no_state_of_other_tests() -> Iterator[None]:
    """Forget the precision of earlier accelerators, of which a process has only one.

    Fixtures of the module are made before this one, so the state is also forgotten afterwards.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def data(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a specification of three items that share images of plain colours."""
    root = tmp_path_factory.mktemp("knowledge")
    generator = torch.Generator().manual_seed(0)
    records = []
    for name, colour in COLOURS.items():
        (root / "colours" / name).mkdir(parents=True)
        for number in range(16):
            noise = torch.randint(-15, 16, (3,), generator=generator).tolist()
            shade = tuple(value + change for value, change in zip(colour, noise, strict=True))
            path = root / "colours" / name / f"{number}.png"
            Image.new("RGB", (64, 64), shade).save(path)
            answer = "yes" if name == "red" else "no"
            turns = [
                {"from": "human", "value": "<image>\nIs it red?"},
                {"from": "gpt", "value": answer},
            ]
            records.append({"image": f"{name}/{number}.png", "conversations": turns})
    (root / "red.jsonl").write_text("\n".join(map(json.dumps, records)))
    items = [
        {"name": "colours", "task": "classify", "images": "colours", "required": 0.5, "head": True},
        {
            "name": "red",
            "task": "vqa",
            "images": "colours",
            "conversations": "red.jsonl",
            "metric": "vqa_score",
            "required": 0.01,
        },
        {"name": "never", "task": "video", "images": "colours", "required": 1.0, "head": True,
         "max_examples": 30},
    ]  # fmt: skip
    (root / "spec.yaml").write_text(
        yaml.safe_dump(
            {
                "base": str(checkpoint),
                "items": items,
                "split": [0.5, 0.25, 0.25],
                "training": {**TRAINING, "max_steps": 8},
            }
        )
    )
    return root


@pytest.fixture(scope="module")
def outcome(data: Path) -> Outcome:
    """Return the outcome of one run into `data/out`."""
    spec = read_spec(data / "spec.yaml")
    return generate(spec, spec.options, data / "work", data / "out")


def test_folders_are_adapters_as_the_server_reads_them(
    checkpoint: Path, data: Path, outcome: Outcome
) -> None:
    shape = adapter_shape(checkpoint, load_config(checkpoint))
    assert outcome.state.adapters
    for adapter in outcome.state.adapters:
        folder = outcome.folders[adapter.number]
        info = load_adapter(folder.name, folder, shape).info
        assert folder.name == f"packed-{adapter.number}-{'-'.join(adapter.items)}"
        assert set(info.accuracy) == set(adapter.items)
        assert info.accuracy == {name: round(outcome.reached[name], 4) for name in adapter.items}
        assert all(path.stat().st_mode & 0o044 == 0o044 & ~UMASK for path in folder.iterdir())
        if "colours" in adapter.items:
            assert set(info.head_labels) == set(COLOURS)


def test_peft_answers_as_the_run_evaluated(checkpoint: Path, data: Path, outcome: Outcome) -> None:
    oracle = Oracle(checkpoint, data / "out")
    splits = load_splits(outcome.spec)
    for adapter in outcome.state.adapters:
        folder = outcome.folders[adapter.number].name
        for name in adapter.items:
            item = outcome.spec.item(name)
            right = [
                oracle.answer(question(item.task, example, folder), folder).text == example.answer
                for example in splits[name].test
            ]
            assert sum(right) / len(right) == pytest.approx(outcome.reached[name]), name


def test_the_report_names_every_item_and_its_promise(data: Path, outcome: Outcome) -> None:
    report = as_json(outcome)
    assert set(report["items"]) == {"colours", "red", "never"}
    sizes = [len(items) for items in report["adapters"].values()]
    assert report["items_per_adapter"] == round(sum(sizes) / len(sizes), 2) >= 1
    for name, item in report["items"].items():
        assert item["kept"] == (item["reached"] is not None and item["reached"] >= item["required"])
        assert item["kept"] == (name not in outcome.missed)
    # The promises of the other items are near 0 and 1, where accuracies vary little.
    assert outcome.uncertain.keys() == {"colours"}, outcome.tests
    path = write_report(outcome, data / "report")
    text = path.read_text()
    assert all(f"| {name} |" in text for name in report["items"])
    assert len(report["merges"]) == len(outcome.state.merges)
    assert all(f"| merge of {', '.join(merge['items'])} |" in text for merge in report["merges"])
    with Image.open(io.BytesIO((data / "report" / "accuracy.png").read_bytes())) as image:
        assert image.width > 100


def test_a_run_that_was_killed_in_an_attempt_ends_with_the_same_weights(
    data: Path, outcome: Outcome, tmp_path: Path
) -> None:
    spec = read_spec(data / "spec.yaml")
    for number in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            generate(spec, spec.options, tmp_path / "work", tmp_path / "out", Killer(number))
    again = generate(spec, spec.options, tmp_path / "work", tmp_path / "out")
    assert again.reached == outcome.reached
    assert again.folders.keys() == outcome.folders.keys()
    for number, folder in outcome.folders.items():
        for file in sorted(folder.glob("*.safetensors")):
            first, second = load_file(file), load_file(again.folders[number] / file.name)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[key], second[key]) for key in first), file


def test_a_finished_run_is_extended_by_a_new_item_and_refuses_a_changed_one(
    data: Path, outcome: Outcome, tmp_path: Path
) -> None:
    spec = read_spec(data / "spec.yaml")
    shutil.copytree(data / "work", tmp_path / "work")
    extra = spec.item("red").model_copy(update={"name": "red-again"})
    longer = spec.model_copy(update={"items": (*spec.items, extra)})
    grown = generate(longer, spec.options, tmp_path / "work", data / "out")
    assert [event.item for event in grown.state.events[: len(outcome.state.events)]] == [
        event.item for event in outcome.state.events
    ]
    held = [name for adapter in grown.state.adapters for name in adapter.items]
    assert "red-again" in [*held, *grown.state.unreachable]
    changed = spec.item("red").model_copy(update={"required": 0.02})
    other = spec.model_copy(update={"items": (spec.items[0], changed, spec.items[2])})
    with pytest.raises(InvalidArgument, match="holds a run with another item 'red'"):
        generate(other, spec.options, tmp_path / "work", data / "out")
    with pytest.raises(InvalidArgument, match=r"packed-1-[a-z-]+ was not written by this run"):
        generate(spec, spec.options, tmp_path / "fresh", data / "out")


def test_merging_with_an_adapter_that_changes_nothing_changes_nothing(
    data: Path, tmp_path: Path
) -> None:
    spec = read_spec(data / "spec.yaml")
    options = spec.options.model_copy(update={"merge": "svd"})
    trainer = PeftTrainer(spec, options, load_splits(spec), tmp_path, Accelerator())
    learner = Learner(trainer.base, spec.training, (), seed=5)
    learner.save(trainer.folder(1))
    weights = load_file(trainer.folder(1) / WEIGHTS)
    generator = torch.Generator().manual_seed(1)
    drawn = {key: torch.randn(value.shape, generator=generator) for key, value in weights.items()}
    learner.save(trainer.folder(2))
    save_file(drawn, trainer.folder(2) / WEIGHTS)
    learner.release()
    merged = trainer.merge(Packed(1, 1, ("red",), {}), Packed(2, 2, (), {}), 3, train=False)
    assert set(merged.scores) == {"red"}
    result = load_file(trainer.folder(3) / WEIGHTS)
    for key in (key for key in drawn if ".lora_A." in key):
        other = key.replace(".lora_A.", ".lora_B.")
        torch.testing.assert_close(
            result[other] @ result[key], drawn[other] @ drawn[key], rtol=1e-4, atol=1e-4
        )


def test_an_attempt_without_progress_ends_early_and_an_item_alone_takes_all_steps(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(data / "spec.yaml")
    training = spec.training.model_copy(
        update={"max_steps": 40, "evaluate_every": 2, "patience": 2}
    )
    spec = spec.model_copy(update={"training": training})
    trainer = PeftTrainer(spec, spec.options, load_splits(spec), tmp_path, Accelerator())
    monkeypatch.setattr(trainer, "evaluate", lambda _, items, __: {one.name: 0.0 for one in items})
    assert trainer.train(spec.item("colours"), None, 1).steps == 40
    held = Packed(1, 1, ("colours",), {"colours": 0.0})
    # The first evaluation is the best one; two more fail, and the rate falls for 8 steps.
    assert trainer.train(spec.item("red"), held, 2).steps == 6 + 8


def test_an_attempt_that_nearly_keeps_its_promises_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(data / "spec.yaml")
    training = spec.training.model_copy(update={"max_steps": 6, "evaluate_every": 3, "restarts": 2})
    spec = spec.model_copy(update={"training": training})
    trainer = PeftTrainer(spec, spec.options, load_splits(spec), tmp_path, Accelerator())
    goal = trainer.goals["colours"]
    for missing, steps in ((1.0, 18), (3.0, 6)):
        scores = {"colours": goal.accuracy - missing * goal.error}
        monkeypatch.setattr(trainer, "evaluate", lambda *_, scores=scores: dict(scores))
        assert trainer.train(spec.item("colours"), None, 1).steps == steps


def test_a_question_is_not_padded_to_the_length_of_a_clip(data: Path, tmp_path: Path) -> None:
    spec = read_spec(data / "spec.yaml")
    splits = load_splits(spec)
    trainer = PeftTrainer(spec, spec.options, splits, tmp_path, Accelerator())
    item = spec.item("colours")
    learner = Learner(trainer.base, spec.training, trainer.labels([item]), 0)
    rows = [
        trainer.base.row(item, example, learner.labels if item.head else ())
        for example in splits["colours"].train[:5]
    ]
    rows += [
        replace(row, prompt=row.prompt[:1] * (70 * n) + row.prompt) for n, row in enumerate(rows)
    ]
    batches = trainer.base.batches(rows)
    assert len(batches) > 1
    assert all(batch.tokens.shape[1] <= 2 * int(batch.mask.sum(1).min()) for batch in batches)
    alone = torch.stack([learner(trainer.base.batches([row])) for row in rows])
    torch.testing.assert_close(learner(batches), alone.mean())


def test_the_saved_state_is_read_back_unchanged(data: Path, outcome: Outcome) -> None:
    saved = json.loads((data / "work" / "state.json").read_text())
    assert RunState.from_json(saved["state"]) == outcome.state


def test_two_processes_share_a_run_and_one_of_them_writes(
    data: Path, outcome: Outcome, tmp_path: Path
) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["vlora.cli", "adapters", "generate", str(data / "spec.yaml"), "--out"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert done.stdout.count("report    ") == 1, done.stdout + done.stderr
    assert report["items"].keys() == as_json(outcome)["items"].keys()
    folders = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert folders == {*report["adapters"], ".generation"}
    for folder in report["adapters"]:
        assert not any(path.is_dir() for path in (tmp_path / "out" / folder).iterdir())

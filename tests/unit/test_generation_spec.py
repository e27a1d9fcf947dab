"""Tests of the specification of a generation run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.knowledge import ITEM, write_images, write_spec
from vlora.cli import app
from vlora.errors import InvalidArgument
from vlora.generation.spec import Training, read_spec
from vlora.generation.trainer import make_accelerator


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with 60 images of two labels and a base folder."""
    write_images(tmp_path)
    return tmp_path


def test_paths_are_relative_to_the_file(data: Path) -> None:
    spec = read_spec(write_spec(data))
    assert (spec.base, spec.items[0].images) == (data / "base", data / "digits")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bases": "x"}, "unknown key 'bases'; did you mean 'base'"),
        ({"training": {"lr": 1}}, "training: unknown key 'lr'; the known keys are rank, alpha"),
        ({"items": []}, r"items is \[\], but should have at least 1 item$"),
        ({"items": ["x"]}, "items.0: needs keys and values, not 'x'$"),
        ({"items": [{"name": "x"}]}, "items.0.task is missing; items.0.images is missing"),
        ({"items": [{**ITEM, "required": 2}]}, "items.0.required is 2, but should be less than"),
        ({"items": [{**ITEM, "required": "90%"}]}, "is '90%', but should be a valid number$"),
        ({"items": [{**ITEM, "task": "clasify"}]}, "unknown task 'clasify'; did you mean 'cla"),
        ({"items": [{**ITEM, "task": "sing"}]}, "unknown task 'sing'; the known tasks are vqa"),
        ({"items": [{**ITEM, "task": "vqa"}]}, "task 'vqa' needs a question"),
        ({"items": [ITEM, ITEM]}, "two items are named 'digits'"),
        ({"items": [{**ITEM, "name": "../up"}]}, "items.0.name is '../up', but should match"),
        ({"items": [{**ITEM, "images": "none"}]}, "'digits': images: .*none does not exist"),
        ({"items": [{**ITEM, "images": "spec.yaml"}]}, "spec.yaml is not a folder"),
        ({"items": [{**ITEM, "images": "a" * 5000}]}, "is not a valid path: File name too long"),
        ({"items": [{**ITEM, "teacher": {}}]}, "give exactly one of pipeline, onnx and python"),
        ({"items": [{**ITEM, "teacher": {"pipeline": {}}}]}, "needs the key 'model'"),
        ({"items": [{**ITEM, "teacher": {"pipeline": {"model": "m"}}}]}, "m does not exist"),
        ({"items": [{**ITEM, "teacher": {"python": "a.b"}}]}, "must have the form 'module:func"),
        ({"items": [{**ITEM, "head": True, "metric": "chrf"}]}, "metric must be top1, not chrf"),
        ({"items": [{**ITEM, "metric": "f1_iou50"}]}, "compares boxes, and task 'classify' has"),
        ({"items": [{**ITEM, "task": "detect", "question": "q"}]}, "metric must be f1_iou50"),
        ({"split": [0.5, 0.5, 0.5]}, "the shares of split must be positive and add up to 1"),
        ({"training": {"rank": 0}}, "training.rank is 0, but should be greater than or equal"),
        ({"training": {"rank": True}}, "training.rank is True, but should be a valid integer"),
        ({"training": {"targets": ["q"]}}, "targets.0 is 'q', but should be 'q_proj', 'k_proj'"),
        ({"options": {"order": "up"}}, "options.order is 'up', but should be 'given'"),
        ({"base": "digits"}, "digits is not a checkpoint: it has no config.json"),
    ],
)
def test_a_wrong_specification_is_reported_by_key(
    data: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_spec(write_spec(data, **changes))


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40)
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[", "is not valid YAML: .* at line 1, column 2"),
        (b"items: &a [*a]\n", "the value at line 1 contains itself"),
        (b"- 1", r"needs keys and values, not \[1\]"),
        (b"", "is empty"),
        (b"x" * (1 << 21), "has more than 1048576 bytes"),
        (b"seed: 1\nbase: caf\xe9\n", "is not UTF-8: line 2 has the byte 0xe9"),
        (b"base: x\nbase: y\n", "has the key 'base' twice, at line 2"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"base: 2026-99-99", "has an invalid value"),
        (b"!!python/object/apply:os.getcwd []", "could not determine a constructor for the tag"),
        (BOMB.encode(), "more than 100000 values if its aliases are replaced"),
        (MERGES.encode(), "more than 100000 values if its aliases are replaced"),
    ],
)
def test_a_file_that_is_no_specification_is_reported(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"spec\.yaml.*{reason}"):
        read_spec(path)


def test_an_alias_may_share_settings(data: Path) -> None:
    path = data / "spec.yaml"
    path.write_text(
        "base: base\nitems:\n- &one {name: a, task: classify, images: digits, required: 0.5}\n"
        "- {<<: *one, name: b}\n"
    )
    assert [item.name for item in read_spec(path).items] == ["a", "b"]


def test_a_base_that_cannot_be_trained_is_reported(data: Path) -> None:
    path = write_spec(data)
    (data / "base" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(
        InvalidArgument, match=r"has the model_type 'qwen2_vl'; .* only for 'llava'"
    ):
        read_spec(path)


def test_a_wrong_specification_is_reported_before_torch_is_imported(data: Path) -> None:
    path = write_spec(data, sed=1)
    script = (
        "import sys\nfrom vlora.cli import app\n"
        f"try:\n    app(['adapters', 'generate', {str(path)!r}, '--out', 'out'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "unknown key 'sed'; did you mean 'seed'" in done.stderr
    assert done.stdout.strip() == "1 False"


def test_a_dry_run_prints_the_plan_and_writes_nothing(data: Path) -> None:
    path = write_spec(data)
    arguments = ["adapters", "generate", str(path), "--out", str(data / "out"), "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "1 attempt of up to 800 steps with 32 examples" in result.output
    assert not (data / "out").exists()


def test_a_file_in_place_of_a_folder_of_results_is_reported(data: Path) -> None:
    path = write_spec(data)
    result = CliRunner().invoke(app, ["adapters", "generate", str(path), "--out", str(path)])
    assert result.exit_code == 1
    assert "spec.yaml cannot be made: File exists" in " ".join(result.output.split())


def test_a_precision_that_the_device_lacks_is_reported() -> None:
    if torch.cuda.is_available():
        pytest.skip("this device has fp16")
    with pytest.raises(InvalidArgument, match="mixed_precision 'fp16' cannot be used here"):
        make_accelerator(Training(mixed_precision="fp16"))


def test_ctrl_c_says_how_to_continue(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vlora.generation.run.generate", interrupted)
    path = write_spec(data)
    result = CliRunner().invoke(
        app, ["adapters", "generate", str(path), "--out", str(data / "out")]
    )
    assert result.exit_code == 130
    assert "stopped; to continue, start the same command again" in result.output

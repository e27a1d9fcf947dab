"""Tests of `vlora premerge`: the choice of the hot adapter, its errors, and its output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.support.small_adapter import edit_config
from vlora.atmm.types import LoraPair
from vlora.cli import app
from vlora.errors import InvalidArgument
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.offline.peft_folder import write_adapter
from vlora.offline.premerge import (
    BASE_ADAPTER,
    REPORT,
    choose_hot,
    read_request_log,
    work_after_merge,
)

WORK = {"small": 10, "large": 60}


Premerge = Callable[..., tuple[int, str]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def premerge(checkpoint: Path, adapters_dir: Path, out: Path) -> Premerge:
    """Return a function that runs the command, and returns its exit status and its output."""

    def run(*arguments: object) -> tuple[int, str]:
        folders = "--model", checkpoint, "--adapters", adapters_dir, "--out", out
        result = CliRunner().invoke(app, ["premerge", *map(str, (*folders, *arguments))])
        return result.exit_code, " ".join(result.output.split())

    return run


@pytest.fixture
def root(adapters_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of the adapters, for a test that changes one of them."""
    return shutil.copytree(adapters_dir, tmp_path / "adapters")


@pytest.mark.parametrize(
    ("requests", "hot"),
    [
        ({"small": 9, "large": 1}, "small"),
        ({"small": 5, "large": 5}, None),
        ({"small": 4, "large": 6}, "large"),
        ({"small": 1, "": 9}, None),
    ],
)
def test_the_adapter_whose_merge_saves_most_is_chosen(
    requests: dict[str, int], hot: str | None
) -> None:
    choice = choose_hot(requests, WORK)
    assert choice.hot == hot
    assert choice.work_after == min(
        choice.work_before, *(work_after_merge(requests, WORK, name) for name in WORK)
    )


def test_work_after_a_merge_counts_each_request_on_its_own() -> None:
    requests = {"small": 3, "large": 4, "": 2, "unknown": 1}
    after = {"small": 10 + 60, "large": 0, "": 60, "unknown": 60}
    expected = sum(count * after[name] for name, count in requests.items()) / 10
    assert work_after_merge(requests, WORK, "large") == expected


def test_a_request_log_is_json_lines_or_names(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    log.write_text('{"lora_name": "a", "tokens": 7}\n\nb\n{"adapter": null}\n{"model": "a"}\n')
    assert read_request_log(log) == {"a": 2, "b": 1, "": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"lora_name": 3}\n', "line 1 has lora_name = 3"),
        (b'a\n{"prompt": "x"}\n', "line 2 names no adapter; use the key 'lora_name'"),
        (b'{"lora_name": \n', "line 1 is not a JSON object"),
        (b"[" * 100 + b"\n{" + b'"a":[' * 5000 + b"\n", "line 2 is not a JSON object"),
        (b"\xff\n", "line 1 is not UTF-8 text"),
        (b"a" * (1 << 21), "line 1 has more than"),
    ],
)
def test_a_broken_request_log_is_rejected_by_line(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    log = tmp_path / "requests.log"
    log.write_bytes(content)
    with pytest.raises(InvalidArgument, match=reason):
        read_request_log(log)


def test_one_broken_adapter_is_left_out_and_reported(
    premerge: Premerge, root: Path, out: Path
) -> None:
    (root / "all-r8" / "adapter_config.json").write_text("{}")
    code, output = premerge("--adapters", root, "--hot", "head-r8", "--max-rank", 12)
    assert code == 1
    assert "left out: adapter 'all-r8': adapter_config.json has peft_type None" in output
    assert "'feed-forward-r16' has rank 16, above 12" in output
    report = json.loads((out / REPORT).read_text())
    assert set(report["deltas"]) == {"attention-r4", "feed-forward-r16", BASE_ADAPTER}
    assert report["deltas"]["attention-r4"] == {"rank": 12}
    written = {path.name for path in (out / "adapters").iterdir()}
    assert written == {*report["deltas"], "head-r8"}
    head = Path("head-r8", "head.safetensors")
    assert (out / "adapters" / head).read_bytes() == (root / head).read_bytes()


def test_weights_that_the_hot_adapter_leaves_alone_stay_bit_for_bit(
    premerge: Premerge, checkpoint: Path, out: Path
) -> None:
    code, output = premerge("--hot", "attention-r4")
    assert code == 0, output
    changed = set()
    for file in sorted(checkpoint.glob("*.safetensors")):
        before, after = load_file(file), load_file(out / "model" / file.name)
        assert before.keys() == after.keys()
        changed |= {key for key, tensor in before.items() if not torch.equal(tensor, after[key])}
    targets = {key.rpartition(".weight")[0].rpartition(".")[2] for key in changed}
    assert targets == {"q_proj", "v_proj"}


def test_a_dry_run_writes_nothing(premerge: Premerge, tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    log.write_text("head-r8\n" * 9 + "attention-r4\n")
    code, output = premerge("--requests", log, "--dry-run")
    assert code == 0, output
    assert "head-r8: 90% of 10 requests; merging it saves" in output
    assert "attention-r4 12" in output
    assert list(tmp_path.iterdir()) == [log]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "pass either --hot NAME or --requests FILE"),
        (["--hot", "head-r9"], "no adapter 'head-r9' in"),
        (["--requests", "missing.log"], "missing.log cannot be read: No such file"),
        (["--requests", "empty.log"], "empty.log has no requests"),
        (["--requests", "other.log"], "names one of the adapters; it has, for example, 'head-r9';"),
        (["--out", "", "--hot", "head-r8"], "exists; name a folder that does not"),
    ],
)
def test_wrong_arguments_are_reported_in_a_sentence(
    premerge: Premerge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").touch()
    (tmp_path / "other.log").write_text("head-r9\n\n")
    code, output = premerge(*arguments)
    assert code == 1
    assert reason in output
    assert "Traceback" not in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.log", "other.log"]


def test_an_adapter_of_a_tied_lm_head_cannot_be_merged(
    premerge: Premerge, checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    tied = shutil.copytree(checkpoint, tmp_path / "tied")
    config = json.loads((tied / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tied / "config.json").write_text(json.dumps(config))
    shape = adapter_shape(tied, load_config(tied))
    factors = LoraPair(torch.ones(2, shape.hidden), torch.ones(shape.vocabulary, 2))
    root = tmp_path / "adapters"
    write_adapter(root / "words", {(-1, "lm_head"): factors}, shape, "base")
    code, output = premerge("--model", tied, "--adapters", root, "--hot", "words")
    assert code == 1
    assert "changes lm_head, which this checkpoint ties" in output
    assert not out.exists()


def test_an_activated_adapter_is_neither_merged_nor_made_a_delta(
    premerge: Premerge, root: Path, out: Path
) -> None:
    edit_config(root / "attention-r4", alora_invocation_tokens=[5, 6])
    code, output = premerge("--adapters", root, "--hot", "attention-r4")
    assert code == 1
    assert "adapter 'attention-r4' is an activated LoRA" in output
    assert not out.exists()
    code, output = premerge("--adapters", root, "--hot", "all-r8")
    assert code == 1
    assert "left out: adapter 'attention-r4' is an activated LoRA" in output
    assert not (out / "adapters" / "attention-r4").exists()

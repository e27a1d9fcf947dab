"""Tests of the offline commands that convert adapters and merge the hot one into the base."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.support.small_adapter import edit_config, edit_tensors
from vlora import cli
from vlora.atmm.types import LoraPair
from vlora.cli import app
from vlora.errors import InvalidArgument
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.model.weight_files import INDEX
from vlora.offline.base_weights import BaseWeights
from vlora.offline.convert import (
    EXACT_SIDE,
    Conversion,
    ConversionLimits,
    convert,
    factorize,
    sufficient_rank,
)
from vlora.offline.peft_folder import write_adapter
from vlora.offline.premerge import (
    BASE_ADAPTER,
    REPORT,
    choose_hot,
    premerged_adapter,
    read_request_log,
    work_after_merge,
)

CONFIG, WEIGHTS, PICKLED = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
Tensors = dict[str, torch.Tensor]
MODULE = "base_model.model.model.language_model.layers.0.self_attn.q_proj"


class Base:
    """Base weights of a checkpoint, read once for all tests."""

    def __init__(self, checkpoint: Path) -> None:
        config = load_config(checkpoint)
        self.checkpoint = checkpoint
        self.shape, self.weights = (
            adapter_shape(checkpoint, config),
            BaseWeights(checkpoint, config),
        )

    def run(self, source: Path, limits: ConversionLimits | None = None) -> Conversion:
        out = source.with_name("out")
        return convert(source, out, self.shape, self.weights, limits or ConversionLimits())


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Base:
    return Base(checkpoint)


@pytest.fixture
def plain(adapters_dir: Path, tmp_path: Path) -> Path:
    """Return a plain LoRA on q and v."""
    shutil.copytree(adapters_dir / "attention-r4", tmp_path / "x")
    return tmp_path / "x"


@pytest.fixture
def dora(plain: Path, base: Base) -> Path:
    """Return a DoRA on q and v whose magnitudes are those of the base model."""
    tensors = load_file(plain / WEIGHTS)
    for key in [key for key in tensors if "lora_A" in key]:
        layer, target = int(key.split(".layers.")[1].split(".")[0]), key.split(".")[-3]
        norms = torch.linalg.norm(base.weights.matrix((layer, target)), dim=1)
        tensors[key.replace("lora_A.weight", "lora_magnitude_vector")] = norms
    save_file(tensors, plain / WEIGHTS)
    edit_config(plain, use_dora=True)
    return plain


def check_refused(
    base: Base, source: Path, reason: str, limits: ConversionLimits | None = None
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        base.run(source, limits)
    message = str(caught.value)
    assert message.startswith("adapter 'x': adapter_")
    assert reason in message
    assert len(message) < 600
    assert sorted(path.name for path in source.parent.iterdir()) == ["x"]


MAGNITUDE = f"{MODULE}.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(MAGNITUDE), "has no lora_magnitude_vector for layers.0.q_proj"),
        (lambda t: t.update({MAGNITUDE: torch.ones(7)}), f"has '{MAGNITUDE}' (7,); it must be"),
        (lambda t: t[MAGNITUDE].fill_(math.nan), f"NaN or Inf in '{MAGNITUDE}'"),
        (lambda t: t[MAGNITUDE].fill_(-math.inf), f"NaN or Inf in '{MAGNITUDE}'"),
        (lambda t: t.update({f"{MAGNITUDE}.weight": torch.ones(192)}), "already has a magnitude"),
        (
            lambda t: t.update({MAGNITUDE.replace("q_proj", "o_proj"): torch.ones(192)}),
            "whose module has no LoRA",
        ),
        (
            lambda t: t.update({MAGNITUDE.replace("model.language", "x"): torch.ones(192)}),
            "not a known layout",
        ),
        (lambda t: t.pop(f"{MODULE}.lora_B.weight"), "has no lora_B"),
        (lambda t: t[f"{MODULE}.lora_A.weight"].fill_(math.inf), "NaN or Inf"),
        (
            lambda t: t.update({f"{MODULE}.weight": torch.ones(192, 192)}),
            "differs from the base model's own (192, 192)",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(9, 192)}),
            "'base_model.model.lm_head.weight' (9, 192), which differs",
        ),
    ],
)
def test_a_broken_dora_is_refused(
    base: Base, dora: Path, change: Callable[[Tensors], object], reason: str
) -> None:
    edit_tensors(dora, change)
    check_refused(base, dora, reason, ConversionLimits(192, 1.0))


def test_a_dora_needs_its_key_in_the_config_and_the_config_its_magnitudes(
    base: Base, dora: Path
) -> None:
    edit_config(dora, use_dora=False)
    check_refused(base, dora, "but adapter_config.json does not set use_dora")
    edit_config(dora, use_dora=True)
    edit_tensors(dora, lambda t: [t.pop(key) for key in list(t) if "magnitude" in key])
    check_refused(base, dora, "has no lora_magnitude_vector for layers.0.q_proj")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "NONSENSE"}, "has peft_type 'NONSENSE', which is not converted"),
        ({"peft_type": ["LORA"]}, "which is not converted; converted are LORA, C3A,"),
        ({"peft_type": "VERA"}, "of type 'VERA' cannot be loaded by PEFT"),
        ({"peft_type": "LOHA", "bias": "all"}, "bias 'all'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"r": 1 << 40}, "with rank 1099511627776 they must be"),
    ],
)
def test_a_config_that_cannot_be_converted_is_refused(
    base: Base, plain: Path, change: dict[str, Any], reason: str
) -> None:
    edit_config(plain, **change)
    check_refused(base, plain, reason)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("SHADOW", {"shadow_model": "someone/model"}),
        ("PROMPT_TUNING", {"tokenizer_name_or_path": "someone/model", "num_virtual_tokens": 1}),
        ("MULTITASK_PROMPT_TUNING", {"num_virtual_tokens": 1}),
        ("XLORA", {"adapters": {"0": "someone/model"}}),
    ],
)
def test_a_config_that_names_other_models_is_refused_before_peft_reads_it(
    base: Base, plain: Path, kind: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft.PeftConfig.from_peft_type", lambda **_: pytest.fail("read"))
    edit_config(plain, peft_type=kind, **more)
    check_refused(base, plain, f"has peft_type '{kind}', which is not converted")


class Code:
    """Object whose pickle runs a command when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


def sparse(tensors: Tensors) -> Any:
    return {key: tensor.to_sparse() for key, tensor in tensors.items()}


PICKLES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "list": (lambda t: list(t.values()), "holds a list; it must hold tensors by key"),
    "numbers": (lambda t: dict.fromkeys(t, 1.0), "which is not a named tensor"),
    "unnamed": (lambda t: dict(enumerate(t.values())), "holds 0, which is not a named tensor"),
    "nested": (lambda t: {"model": t}, "holds 'model', which is not a named tensor"),
    "whole": (lambda t: {k: x.long() for k, x in t.items()}, "as torch.int64"),
    "sparse": (sparse, "torch.sparse_coo; it must be dense"),
    "terabytes": (
        lambda t: {k: torch.ones(1).expand(1 << 20, 1 << 20) for k in t},
        "the limit is 4294967296",
    ),
    "nan": (lambda t: {k: x * math.nan for k, x in t.items()}, "NaN or Inf"),
    "none": (lambda t: {}, "holds no LoRA weights"),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_holds_no_adapter_is_refused(base: Base, plain: Path, kind: str) -> None:
    make, reason = PICKLES[kind]
    torch.save(make(load_file(plain / WEIGHTS)), plain / PICKLED)
    (plain / WEIGHTS).unlink()
    check_refused(base, plain, reason)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_named_and_never_run(base: Base, plain: Path, zipped: bool) -> None:
    tensors: dict[str, Any] = load_file(plain / WEIGHTS)
    ran = plain / "ran"
    torch.save(
        tensors | {"code": Code(ran)}, plain / PICKLED, _use_new_zipfile_serialization=zipped
    )
    (plain / WEIGHTS).unlink()
    check_refused(base, plain, "holds the code 'posix.system', which is never run")
    assert not ran.exists()


def test_a_program_in_place_of_tensors_is_refused_without_advice_to_run_it(
    base: Base, plain: Path
) -> None:
    torch.save(load_file(plain / WEIGHTS), plain / PICKLED)
    with zipfile.ZipFile(plain / PICKLED, "a") as archive:
        archive.writestr("adapter_model/constants.pkl", b"")  # Only TorchScript has this file.
    (plain / WEIGHTS).unlink()
    check_refused(base, plain, "holds a program, which is never run; only tensors are read")


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04" + bytes(99), b"\x80\x02}."])
def test_bytes_that_are_no_pickle_are_refused(base: Base, plain: Path, content: bytes) -> None:
    (plain / PICKLED).write_bytes(content)
    (plain / WEIGHTS).unlink()
    check_refused(base, plain, "adapter_model.bin")


# In a process of its own, since memory that other tests' threads free adds to the limit.
READ_ARCHIVES = """
import sys
from pathlib import Path
from vlora.adapters.errors import ErrorFactory
from vlora.errors import InvalidArgument
from vlora.offline import convert
convert.READER_BYTES = 1 << 25
for path in sys.argv[1:]:
    try:
        convert.PickledTensors(Path(path), ErrorFactory("x", path))
    except InvalidArgument as error:
        print(error)
"""


def test_a_pickle_that_unpacks_to_much_more_than_its_size_is_refused(tmp_path: Path) -> None:
    """Archives whose members `zipfile` does not see, and torch does, are refused, too."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save({"key": torch.zeros(1 << 25)}, saved)
    with ZipFile(saved) as source, ZipFile(packed, "w", ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    content = packed.getvalue()
    end = content.rindex(b"PK\5\6")
    (start,) = struct.unpack_from("<I", content, end + 16)
    harmless = content[start:end].replace(struct.pack("<I", 4 << 25), struct.pack("<I", 1))
    archives = {
        "plain": content,
        "hidden_by_an_end": content + b"PK\5\6",
        "hidden_by_a_directory": content[:end] + harmless + content[end:],
    }
    for name, archive in archives.items():
        (tmp_path / name).write_bytes(archive)
    command = [sys.executable, "-c", READ_ARCHIVES, *(str(tmp_path / name) for name in archives)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    messages = done.stdout.splitlines()
    assert len(messages) == len(archives), done.stdout
    for name, message in zip(archives, messages, strict=True):
        assert f"{name} cannot be read as tensors in 33" in message, done.stdout


def test_the_safetensors_file_wins_over_a_pickle(base: Base, plain: Path) -> None:
    (plain / PICKLED).write_bytes(b"anything")
    assert base.run(plain).ranks == (4,)


def test_an_activated_adapter_stays_activated(base: Base, plain: Path) -> None:
    torch.save(load_file(plain / WEIGHTS), plain / PICKLED)
    (plain / WEIGHTS).unlink()
    edit_config(plain, alora_invocation_tokens=[5, 6])
    edit_config(plain, use_dora=True)
    check_refused(base, plain, "asks for DoRA as an activated LoRA, which cannot be converted")
    edit_config(plain, use_dora=False)
    base.run(plain)
    config = json.loads((plain.with_name("out") / CONFIG).read_text())
    assert config["alora_invocation_tokens"] == [5, 6]


def test_the_task_head_is_kept(base: Base, adapters_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(adapters_dir / "head-r8", tmp_path / "x")
    base.run(tmp_path / "x")
    for file in ("vlora.json", "head.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "x" / file).read_bytes()


def test_a_missing_folder_is_named_and_a_target_that_exists_is_not_touched(
    base: Base, plain: Path
) -> None:
    with pytest.raises(InvalidArgument, match=r"^no adapter folder at .*/nowhere$"):
        base.run(plain.with_name("nowhere"))
    assert list(plain.parent.iterdir()) == [plain]
    plain.with_name("out").mkdir()
    with pytest.raises(InvalidArgument, match="exists; name a folder that does not"):
        base.run(plain)
    assert not list(plain.with_name("out").iterdir())


def test_random_projection_is_nearly_as_good_as_the_whole_decomposition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(300, 200, generator=generator)
    change *= torch.linspace(0.1, 1, 300)[:, None]
    for rank in (1, 8, 64, 200):
        best = factorize(change, rank)
        with monkeypatch.context() as patch:
            patch.setattr("vlora.offline.convert.EXACT_SIDE", 100)
            random = factorize(change, rank)
        assert EXACT_SIDE > 200
        assert best.rank == random.rank == rank
        assert best.error - 1e-5 <= random.error <= 1.01 * best.error + 1e-5
        if rank < 200:
            assert sufficient_rank(change, best.error * 1.0001) == rank
            assert sufficient_rank(change.T, best.error * 1.0001) == rank


def test_the_rank_is_no_higher_than_that_of_the_change() -> None:
    change = torch.randn(50, 3) @ torch.randn(3, 40)
    assert factorize(change, 20).rank == 3
    assert factorize(change, 20).error < 1e-5
    assert factorize(torch.zeros(5, 4), 3).error == 0.0


def test_the_command_prints_the_error_and_refuses_above_the_limit(
    base: Base, dora: Path, checkpoint: Path, tmp_path: Path
) -> None:
    def invoke(*arguments: str) -> Any:
        out = str(tmp_path / "out")
        model = ["--model", str(checkpoint)]
        return CliRunner().invoke(
            cli.app, ["adapters", "convert", str(dora), out, *model, *arguments]
        )

    refused = invoke("--rank", "5")
    assert refused.exit_code == 1
    assert "This matrix needs --rank" in refused.output
    done = invoke("--rank", "192")
    assert done.exit_code == 0, done.output
    assert "DoRA → LoRA of rank" in done.output
    assert "of the adapter's change, at most" in done.output


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
    assert premerged_adapter(out / "model", out / "adapters") == "head-r8"
    assert premerged_adapter(out / "model", root) is None
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
    # A head that differs from the embeddings would be used, although the configuration ties them.
    index = json.loads((tied / INDEX).read_text())
    head = "language_model.lm_head.weight"
    file = tied / index["weight_map"].pop(head)
    (tied / INDEX).write_text(json.dumps(index))
    save_file({key: tensor for key, tensor in load_file(file).items() if key != head}, file)
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


def quantize(source: Path, out: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", "quantize", str(source), str(out), *options])
    return done.exit_code, done.output


# What is wrong, and the refusal.
UNQUANTIZABLE = {
    "exists": "out exists; name a folder that does not",
    "inside": "is in .*; name a folder outside of it",
    "group": "q_proj has 192 inputs, which is not a multiple of the group size 128; use a smaller",
    "option": "--group-size 64 is for int4 alone; leave it out",
    "disk": r"out needs 0.005 GB, but the disk has 0.001 GB free",
    "again": "is quantized by compressed-tensors; this operation needs weights stored as float32",
    "nan": "holds '.*gate_proj.weight', which cannot be quantized: row 0 has a value that is not",
}


@pytest.mark.parametrize("fault", UNQUANTIZABLE)
def test_what_cannot_be_quantized_is_refused_and_leaves_nothing(
    fault: str, checkpoint: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, options = tmp_path / "source", out, {"group": "128", "option": "64"}.get(fault)
    shutil.copytree(checkpoint, source)
    arguments = ["--group-size", options] if options else []
    if fault == "exists":
        out.mkdir()
        monkeypatch.setattr("vlora.offline.quantize.quantize_folder", None)  # It is not begun.
    elif fault == "inside":
        target = source / "int4"
    elif fault == "option":
        arguments += ["--quantization", "int8"]
    elif fault == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    elif fault == "again":
        quantize(checkpoint, tmp_path / "first")
        source = tmp_path / "first"
    elif fault == "nan":
        file = source / "model-00001-of-00002.safetensors"
        tensors = load_file(file)
        next(value for key, value in tensors.items() if "gate_proj" in key)[0, 5] = torch.nan
        save_file(tensors, file)
    before = sorted(tmp_path.rglob("*"))
    code, output = quantize(source, target, *arguments)
    assert code == 1
    assert re.search(UNQUANTIZABLE[fault], output)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_quantization_leaves_nothing(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def interrupt(*arguments: Any) -> Any:
        steps.append(out.with_name("out.part").is_dir())
        raise KeyboardInterrupt

    monkeypatch.setattr("vlora.offline.quantize.quantized_parts", interrupt)
    assert quantize(checkpoint, out)[0] != 0
    assert steps == [True]
    assert list(out.parent.iterdir()) == []


def test_a_quantized_folder_has_the_other_files_and_weights_unchanged(
    checkpoint: Path, out: Path
) -> None:
    code, output = quantize(checkpoint, out, "--group-size", "64")
    assert (code, output[:2]) == (0, "ok")
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", INDEX):
            assert (out / file.name).read_bytes() == file.read_bytes()
    index = json.loads((out / INDEX).read_text())["weight_map"]
    for file in checkpoint.glob("*.safetensors"):
        stored, copied = load_file(file), load_file(out / file.name)
        assert {index[key] for key in copied} == {file.name}
        kept = stored.keys() & copied.keys()
        assert all(torch.equal(stored[key], copied[key]) for key in kept)
        removed = stored.keys() - kept
        assert removed == {
            key.replace("_packed", "") for key in copied if key.endswith(".weight_packed")
        }
        assert len(removed) == sum("_proj.weight" in key and "layers" in key for key in removed)

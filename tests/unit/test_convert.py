"""Tests that the conversion refuses hostile adapters in one sentence and writes nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.support.small_adapter import edit_config, edit_tensors
from vlora import cli
from vlora.errors import InvalidArgument
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.offline.base_weights import BaseWeights
from vlora.offline.convert import (
    EXACT_SIDE,
    Conversion,
    ConversionLimits,
    convert,
    factorize,
    sufficient_rank,
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
        ({"peft_type": "IA3"}, "of type 'IA3' cannot be loaded by PEFT"),
        ({"peft_type": "NONSENSE"}, "of type 'NONSENSE' cannot be loaded by PEFT"),
        ({"peft_type": ["LORA"]}, "cannot be loaded by PEFT"),
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


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04" + bytes(99), b"\x80\x02}."])
def test_bytes_that_are_no_pickle_are_refused(base: Base, plain: Path, content: bytes) -> None:
    (plain / PICKLED).write_bytes(content)
    (plain / WEIGHTS).unlink()
    check_refused(base, plain, "adapter_model.bin")


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

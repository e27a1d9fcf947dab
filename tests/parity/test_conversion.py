"""Parity of converted adapters with PEFT on the originals, within the stated error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.support import adapter_kinds as kinds
from tests.support.families import Family
from tests.support.small_adapter import edit_tensors
from vlora.adapters.files import load_adapter
from vlora.adapters.peft import parse_key
from vlora.errors import InvalidArgument
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.offline.base_weights import BaseWeights
from vlora.offline.convert import Conversion, ConversionLimits, convert

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*changes the base weights", "ignore:Unsupported layer type"
)
FULL_RANK = 96


def run(checkpoint: Path, source: Path, out: Path, limits: ConversionLimits) -> Conversion:
    config = load_config(checkpoint)
    return convert(
        source, out, adapter_shape(checkpoint, config), BaseWeights(checkpoint, config), limits
    )


def load_alone(family: Family, folder: Path, name: str) -> None:
    """Load only this adapter into the oracle: PEFT changes the base model for some kinds."""
    model = PeftModel.from_pretrained(kinds.stock(family.checkpoint), folder, name)
    family.model = model.eval()


@pytest.mark.parametrize("kind", kinds.CONVERTED)
def test_a_converted_adapter_answers_as_the_original_with_peft(
    family: Family, tmp_path: Path, kind: str
) -> None:
    kinds.save(kinds.CONVERTED[kind](family.checkpoint), tmp_path / "source" / kind)
    limits = ConversionLimits(FULL_RANK, 1e-4)
    result = run(family.checkpoint, tmp_path / "source" / kind, tmp_path / "root" / kind, limits)
    assert result.error < 1e-5
    load_alone(family, tmp_path / "source" / kind, kind)
    kinds.check_answers(family, tmp_path / "root", {kind: kind})


@pytest.mark.parametrize("kind", ["dora", "loha"])
@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_the_stated_error_is_that_of_the_weights(family: Family, tmp_path: Path, kind: str) -> None:
    model = kinds.CONVERTED[kind](family.checkpoint)
    kinds.save(model, tmp_path / kind)
    merged = model.merge_and_unload().state_dict()
    base = kinds.stock(family.checkpoint).state_dict()
    config = load_config(family.checkpoint)
    shape = adapter_shape(family.checkpoint, config)
    changes = {
        parse_key(key, shape).matrix: merged[key] - base[key]
        for key in base
        if ".language_model.layers." in key and not torch.equal(merged[key], base[key])
    }
    errors = []
    for rank in (8, 20, 40):
        out = tmp_path / f"{kind}-{rank}"
        result = run(family.checkpoint, tmp_path / kind, out, ConversionLimits(rank, 1.0))
        pairs = load_adapter(kind, out, shape).pairs
        assert result.errors.keys() == pairs.keys() == changes.keys()
        for matrix, (a, b) in pairs.items():
            assert a.shape[0] <= rank
            change = changes[matrix]
            error = torch.linalg.norm(change - b @ a) / torch.linalg.norm(change)
            best = torch.linalg.svdvals(change)[rank:].norm() / torch.linalg.norm(change)
            assert result.errors[matrix] == pytest.approx(float(error), rel=1e-2, abs=1e-5)
            assert float(error) <= 1.01 * float(best) + 1e-5
        left = math.hypot(*(result.errors[m] * float(changes[m].norm()) for m in changes))
        total = math.hypot(*(float(change.norm()) for change in changes.values()))
        assert result.error == pytest.approx(left / total, rel=1e-2, abs=1e-5)
        errors.append(result.error)
    assert errors == sorted(errors, reverse=True)
    assert (errors[-1] > 1e-3) == (kind == "dora"), "a DoRA has full rank, this LoHa rank 16"


@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_an_error_above_the_limit_is_refused_with_the_rank_that_keeps_it(
    family: Family, tmp_path: Path
) -> None:
    kinds.save(kinds.lora(family.checkpoint, use_dora=True), tmp_path / "dora")
    with pytest.raises(InvalidArgument, match=r"the limit is 0\.05.*needs --rank") as caught:
        run(family.checkpoint, tmp_path / "dora", tmp_path / "out", ConversionLimits(8, 0.05))
    assert not list(tmp_path.glob("out*"))
    rank = int(str(caught.value).split("--rank ")[1].split(";")[0])
    result = run(
        family.checkpoint, tmp_path / "dora", tmp_path / "out", ConversionLimits(rank + 2, 0.05)
    )
    assert result.worst <= 0.05
    assert max(result.ranks) == rank + 2


@pytest.mark.parametrize("layout", kinds.LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_all_layouts_of_a_dora_convert_to_the_same_adapter(
    family: Family, tmp_path: Path, layout: str
) -> None:
    kinds.save(kinds.lora(family.checkpoint, use_dora=True), tmp_path / "dora")
    kinds.rename(tmp_path / "dora", tmp_path / layout, kinds.LAYOUTS[layout])
    for name in ("dora", layout):
        run(family.checkpoint, tmp_path / name, tmp_path / f"out-{name}", ConversionLimits(20, 1.0))
    ours, theirs = (
        load_file(tmp_path / f"out-{name}" / "adapter_model.safetensors")
        for name in ("dora", layout)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def pickled(folder: Path) -> None:
    """Store the weights of a folder as PEFT did before safetensors."""
    tensors: dict[str, Any] = load_file(folder / "adapter_model.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_a_pickle_is_converted_without_a_change_of_any_value(
    family: Family, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = kinds.lora(family.checkpoint, rank_pattern={"q_proj": 2}).to(dtype)
    kinds.save(model, tmp_path / "x")
    expected = load_file(tmp_path / "x" / "adapter_model.safetensors")
    pickled(tmp_path / "x")
    result = run(family.checkpoint, tmp_path / "x", tmp_path / "out", ConversionLimits(1, 0.0))
    assert (result.error, result.ranks) == (0.0, (2, 4))
    got = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {key: tensor.dtype for key, tensor in got.items()} == dict.fromkeys(expected, dtype)
    assert all(torch.equal(got[key], expected[key]) for key in expected)


@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_copies_of_the_base_are_dropped_and_trained_ones_are_refused(
    family: Family, tmp_path: Path
) -> None:
    saved = ["lm_head", "embed_tokens"]
    model = kinds.lora(family.checkpoint, modules_to_save=saved)
    model.save_pretrained(tmp_path / "trained")
    edit_tensors(tmp_path / "trained", lambda t: [t.pop(k) for k in [*t] if "lm_head" in k])
    kinds.restore_copies(model, family.checkpoint)
    model.save_pretrained(tmp_path / "copied")
    assert len(load_file(tmp_path / "copied" / "adapter_model.safetensors")) == 2 * 15 + 2
    result = run(
        family.checkpoint, tmp_path / "copied", tmp_path / "root" / "x", ConversionLimits()
    )
    assert len(result.dropped) == 2
    load_alone(family, tmp_path / "copied", "x")
    kinds.check_answers(family, tmp_path / "root", {"x": "x"})
    with pytest.raises(InvalidArgument, match=r"differs from the base model's .* train without it"):
        run(family.checkpoint, tmp_path / "trained", tmp_path / "out", ConversionLimits())
    assert not list(tmp_path.glob("out*"))

"""Parity with transformers and PEFT for adapters of every kind and layout that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.support import adapter_kinds as kinds
from tests.support.adapter_kinds import check_answers
from tests.support.families import Family


def test_every_served_kind_answers_as_with_peft(family: Family, tmp_path: Path) -> None:
    for name, recipe in kinds.SERVED.items():
        kinds.save(recipe(family.checkpoint), tmp_path / name)
        family.model.load_adapter(tmp_path / name, name)
    check_answers(family, tmp_path, {name: name for name in kinds.SERVED})


def test_every_layout_answers_as_with_peft(family: Family, tmp_path: Path) -> None:
    path = f"{kinds.LAYOUT}layers.1.self_attn.q_proj"
    model = kinds.lora(family.checkpoint, rank_pattern={path: 3}, alpha_pattern={path: 5})
    kinds.save(model, tmp_path / "wild" / "transformers-5")
    family.model.load_adapter(tmp_path / "wild" / "transformers-5", "twin")
    for name, prefix in kinds.LAYOUTS.items():
        kinds.rename(tmp_path / "wild" / "transformers-5", tmp_path / "wild" / name, prefix)
    names = dict.fromkeys(("transformers-5", *kinds.LAYOUTS), "twin")
    check_answers(family, tmp_path / "wild", names)


@pytest.mark.filterwarnings("ignore:.*changes the base weights")
@pytest.mark.parametrize("kind", ["pissa", "olora"])
@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_a_converted_pissa_answers_as_its_changed_base(
    family: Family, tmp_path: Path, kind: str
) -> None:
    changed = kinds.save_converted_pissa(family.checkpoint, tmp_path / "root" / kind, kind)
    family.model.load_adapter(tmp_path / "root" / kind, kind)
    check_answers(family, tmp_path / "root", {kind: kind})
    family.model.set_adapter(kind)
    tokens = torch.randint(5, 400, (1, 12))
    with torch.inference_mode():
        torch.testing.assert_close(
            family.model(input_ids=tokens).logits,
            changed(input_ids=tokens).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def _decoder(model: Any) -> Any:
    config = model.config.text_config
    decoder = LlamaForCausalLM(config)
    decoder.model, decoder.lm_head = model.model.language_model, model.lm_head
    return decoder


@pytest.mark.parametrize(
    ("part", "prefix"),
    [
        (lambda model: model.model.language_model, ""),
        (lambda model: model.model, "language_model."),
        (_decoder, "model."),
        (lambda model: model, kinds.LAYOUT),
    ],
    ids=["bare", "without-head", "decoder", "whole"],
)
def test_the_layouts_are_those_that_peft_writes(
    checkpoint: Path, tmp_path: Path, part: Any, prefix: str
) -> None:
    """The layout of transformers 4 alone cannot be written by the installed transformers."""
    config = LoraConfig(r=4, target_modules=r"(.*language_model\.)?(model\.)?layers.*q_proj")
    kinds.save(get_peft_model(part(kinds.stock(checkpoint)), config), tmp_path)
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert {prefix_of(key) for key in keys} == {prefix}
    assert prefix in {kinds.LAYOUT, *kinds.LAYOUTS.values()}


def prefix_of(key: str) -> str:
    return key.removeprefix("base_model.model.").partition("layers.")[0]

"""Adapters of every common kind, made by PEFT on a small checkpoint.

A recipe returns the trained model, and `save` writes it as PEFT would. This module does not know
how the server reads the folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import (
    EvaConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    get_peft_model,
    initialize_lora_eva_weights,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.support.engine_client import run_questions
from tests.support.families import Family
from tests.support.oracle import NEAR_TIE
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import ImageFeatures
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render

MAX_TOKENS = 12
TARGETS = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
LAYOUT = "model.language_model."
"""Prefix of the paths that PEFT writes with the installed transformers."""
LAYOUTS = {
    "transformers-4": "language_model.model.",
    "decoder": "model.",
    "without-head": "language_model.",
    "bare": "",
}
"""Prefixes that other versions and libraries write, by name of the layout."""


def stock(checkpoint: Path) -> Any:
    """Return transformers' model of a checkpoint in fp32."""
    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)


def train(model: Any, seed: int) -> Any:
    """Change the trainable weights of a PEFT model as training would, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                change = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.25 * change)
    return model


def lora(checkpoint: Path, **options: Any) -> Any:
    """Return a trained LoRA with these options."""
    torch.manual_seed(len(str(options)))
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | options))
    return train(get_peft_model(stock(checkpoint), config), seed=1)


def _eva(checkpoint: Path) -> Any:
    """Return an adapter initialised by EVA, which gives each matrix a rank of its own."""
    torch.manual_seed(0)
    model = get_peft_model(
        stock(checkpoint),
        LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="eva", eva_config=EvaConfig()),
        low_cpu_mem_usage=True,
    )
    batches = [{"input_ids": torch.randint(5, 400, (2, 16))} for _ in range(4)]
    initialize_lora_eva_weights(
        model,
        batches,
        prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=_rows,
        show_progress_bar=False,
    )
    return train(model, seed=2)


def _rows(inputs: Any, *_: Any) -> torch.Tensor:
    """Return a layer's inputs, [rows, d_in]."""
    rows = inputs[0] if isinstance(inputs, tuple) else inputs
    return rows.reshape(-1, rows.shape[-1])


SERVED: Mapping[str, Callable[[Path], Any]] = {
    "plain": lora,
    "rslora": lambda checkpoint: lora(checkpoint, use_rslora=True),
    "patterns": lambda checkpoint: lora(
        checkpoint,
        rank_pattern={"up_proj": 2, "layers.1.self_attn.q_proj": 9},
        alpha_pattern={r"layers\.[02]\.mlp\.\w+": 3},
    ),
    "patterns-rslora": lambda checkpoint: lora(
        checkpoint, use_rslora=True, rank_pattern={"down_proj": 7}, alpha_pattern={"o_proj": 5}
    ),
    "gaussian": lambda checkpoint: lora(checkpoint, init_lora_weights="gaussian"),
    "orthogonal": lambda checkpoint: lora(checkpoint, init_lora_weights="orthogonal"),
    "mica": lambda checkpoint: lora(checkpoint, init_lora_weights="mica"),
    "eva": _eva,
    "lm-head": lambda checkpoint: lora(checkpoint, target_modules=rf"{TARGETS}|lm_head"),
}
"""Kinds that the server accepts unchanged."""


CONVERTED: Mapping[str, Callable[[Path], Any]] = {
    "dora": lambda checkpoint: lora(checkpoint, use_dora=True),
    "dora-rslora": lambda checkpoint: lora(
        checkpoint, use_dora=True, use_rslora=True, rank_pattern={"q_proj": 7}
    ),
    "dora-lm-head": lambda checkpoint: lora(
        checkpoint, use_dora=True, target_modules=rf"{TARGETS}|lm_head"
    ),
    "pissa": lambda checkpoint: lora(checkpoint, init_lora_weights="pissa"),
    "olora": lambda checkpoint: lora(checkpoint, init_lora_weights="olora", use_rslora=True),
    "loha": lambda checkpoint: _other(checkpoint, LoHaConfig(r=4, target_modules=TARGETS)),
    "lokr": lambda checkpoint: _other(checkpoint, LoKrConfig(r=4, target_modules=TARGETS)),
}
"""Kinds that the server refuses unchanged, and accepts after a conversion."""


def _other(checkpoint: Path, config: Any) -> Any:
    """Return a trained adapter of a method other than LoRA."""
    torch.manual_seed(6)
    return train(get_peft_model(stock(checkpoint), config), seed=7)


def restore_copies(model: Any, checkpoint: Path) -> None:
    """Set an adapter's whole weights (`modules_to_save`) to those of the base model."""
    base = stock(checkpoint).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                path = name.removeprefix("base_model.model.")
                parameter.copy_(base[path.replace(".modules_to_save.default", "")])


def save(model: Any, folder: Path, **arguments: Any) -> None:
    """Write a trained model's adapter as PEFT does."""
    model.save_pretrained(folder, save_embedding_layers=False, **arguments)


def save_converted_pissa(checkpoint: Path, folder: Path, kind: str) -> Any:
    """Train an adapter whose initialisation changes the base model, and write the plain LoRA into
    which PEFT converts it.

    kind: value of `init_lora_weights`, such as "pissa".

    Return the trained model with its changed base.
    """
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=kind)
    model = get_peft_model(stock(checkpoint), config)
    initial = folder.with_name("initial")
    save(model, initial)
    train(model, seed=4)
    save(model, folder, path_initial_model_for_weight_conversion=str(initial))
    return model


def rename(source: Path, target: Path, prefix: str) -> None:
    """Write a copy of an adapter in another layout, with renamed tensors and patterns."""
    target.mkdir(parents=True)
    tensors = load_file(source / "adapter_model.safetensors")
    renamed = {key.replace(LAYOUT, prefix): tensor for key, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "adapter_config.json").read_text())
    config["target_modules"] = sorted(
        re.sub(r"^base_model\.model\.|\.lora_A\.weight$", "", key)
        for key in renamed
        if "lora_A" in key
    )
    for name in ("rank_pattern", "alpha_pattern"):
        config[name] = {
            pattern.replace(LAYOUT, prefix): value for pattern, value in config[name].items()
        }
    (target / "adapter_config.json").write_text(json.dumps(config))


def _questions(family: Family) -> Iterator[tuple[str, list[DecodedImage]]]:
    """Yield a question without an image and one with an image."""
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    for images in (0, 1):
        pixels = np.random.default_rng(3).integers(0, 256, (images, 40, 60, 3), np.uint8)
        text = f"{'<image> ' * images}what is the shape of all this?"
        prompt = render("vqa", text, images, 0, template)
        yield prompt, [DecodedImage(one) for one in pixels]


def _answers(family: Family, root: Path, names: list[str]) -> dict[str, list[list[int]]]:
    """Return the answers' tokens for all questions by each adapter, computed in one batch."""
    engine = Engine(Options(model=family.checkpoint, adapters=root))
    assert not engine.adapters.table.broken
    questions = list(_questions(family))
    own: list[ImageFeatures | None] = []
    for _, images in questions:
        encoded = family.service.run([images])[0] if images else None
        features = encoded and ImageFeatures(encoded.features, encoded.layout)
        own += [features] * len(names)
    asked = [(*question, name) for question in questions for name in names]
    tokens, _ = run_questions(engine, asked, own, MAX_TOKENS)
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    for number, (*_, name) in enumerate(asked):
        found[name].append(tokens[str(number)])
    return found


def check_answers(family: Family, root: Path, names: Mapping[str, str]) -> None:
    """Check that the adapters in `root` give PEFT's answers.

    names: PEFT's name of each adapter, by its name in `root`.
    """
    seen = set()
    questions = list(_questions(family))
    of_base = [family.greedy(prompt, images, None, MAX_TOKENS) for prompt, images in questions]
    for name, tokens in _answers(family, root, list(names)).items():
        for (prompt, images), answer, base in zip(questions, tokens, of_base, strict=True):
            assert len(answer) == MAX_TOKENS
            assert family.gap(prompt, images, names[name], answer) <= NEAR_TIE, name
            assert answer != base, "it changes nothing"
            seen.add((names[name], prompt, *answer))
    assert len(seen) == 2 * len(set(names.values()))

"""A small adapter in a folder of its own, and changes of its files, for tests of the reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vlora.adapters.model_shape import ModelShape

LAYERS, HIDDEN, MIDDLE, VOCABULARY, RANK = 2, 12, 20, 30, 4
SHAPES = {
    "q_proj": (12, 12),
    "k_proj": (6, 12),
    "v_proj": (6, 12),
    "o_proj": (12, 12),
    "gate_proj": (MIDDLE, HIDDEN),
    "up_proj": (MIDDLE, HIDDEN),
    "down_proj": (HIDDEN, MIDDLE),
}
TARGETED = ["q_proj", "up_proj"]
PREFIX = "base_model.model.model.language_model.layers"


def small_shape() -> ModelShape:
    """Return the shape of the model that the adapter was trained for."""
    lm_head = torch.randn(VOCABULARY, HIDDEN)
    return ModelShape(
        layers=LAYERS,
        hidden=HIDDEN,
        vocabulary=VOCABULARY,
        shapes=SHAPES,
        prefix="model.language_model.",
        lm_head=lambda: lm_head,
    )


def write_small_adapter(path: Path) -> Path:
    """Write a valid adapter on q and up of both layers to the new folder `path`; return it."""
    tensors = {}
    for layer in range(LAYERS):
        for block, target in (("self_attn", "q_proj"), ("mlp", "up_proj")):
            d_out, d_in = SHAPES[target]
            where = f"{PREFIX}.{layer}.{block}.{target}"
            tensors[f"{where}.lora_A.weight"] = torch.randn(RANK, d_in)
            tensors[f"{where}.lora_B.weight"] = torch.randn(d_out, RANK)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": TARGETED}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply a function to the tensors by key, and write the result."""
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def key(layer: int, which: str) -> str:
    return f"{PREFIX}.{layer}.self_attn.q_proj.lora_{which}.weight"

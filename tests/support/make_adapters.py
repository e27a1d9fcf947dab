"""Random LoRA adapters of different ranks, targets and scalings, saved by PEFT.

This module does not know how the server reads them. The parity tests load the folders with PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlavaForConditionalGeneration

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterSpec:
    """Description of one adapter. `description` becomes its `vlora.json`. `labels` give it a
    task head."""

    name: str
    rank: int
    targets: tuple[str, ...]
    alpha: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] | None = None
    labels: tuple[str, ...] = ()


SPECS: tuple[AdapterSpec, ...] = (
    AdapterSpec("attention-r4", rank=4, targets=("q_proj", "v_proj"), alpha=8),
    AdapterSpec("all-r8", rank=8, targets=ATTENTION + FEED_FORWARD, options={"use_rslora": True}),
    AdapterSpec(
        "feed-forward-r16",
        rank=16,
        targets=FEED_FORWARD,
        alpha=32,
        options={"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"up_proj": 3}},
        description={"tasks": ["caption"], "accuracy": {"caption": 0.5}},
    ),
    AdapterSpec(
        "head-r8",
        rank=8,
        targets=ATTENTION,
        description={
            "tasks": ["classify", "vqa"],
            "head": {"labels": ["cat", "dog", "bird"], "tasks": ["classify"]},
        },
        labels=("cat", "dog", "bird"),
    ),
)
"""Adapters of the fixture `adapters_dir`. A name states the targets and the rank."""


def make_adapters(
    checkpoint: Path, folder: Path, specs: tuple[AdapterSpec, ...] = SPECS, seed: int = 0
) -> Path:
    """Write one folder per spec into `folder`, and return `folder`."""
    for offset, spec in enumerate(specs):
        torch.manual_seed(seed + offset)
        model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        names = "|".join(spec.targets)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=rf"(?:.*language_model.*\.)?({names})",
            init_lora_weights=False,
            lora_dropout=0.0,
            **spec.options,
        )
        hidden = model.config.text_config.hidden_size
        get_peft_model(model, config).save_pretrained(folder / spec.name)
        if spec.description is not None:
            (folder / spec.name / "vlora.json").write_text(json.dumps(spec.description))
        if spec.labels:
            save_file(
                {
                    "weight": torch.randn(len(spec.labels), hidden) * 0.2,
                    "bias": torch.randn(len(spec.labels)) * 0.1,
                },
                folder / spec.name / "head.safetensors",
            )
    return folder

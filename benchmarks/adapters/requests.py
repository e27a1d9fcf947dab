"""Random adapter folders, and the order in which the requests of a trace use them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlora.model.decoder_config import DecoderConfig
from vlora.weights.slab import ATTENTION

ZIPF_EXPONENT = 1.0
CHURN_SET, CHURN_SHIFT, CHURN_INTERVAL = 8, 4, 40
"""Churning trace: size of its working set, number of adapters that are replaced at a time, and
number of requests between two replacements."""


def save_adapters(root: Path, config: DecoderConfig, rank: int, count: int) -> list[str]:
    """Save `count` folders of random weights in PEFT's format, and return their names."""
    generator = torch.Generator().manual_seed(rank)
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    adapter_config |= {"target_modules": sorted(config.target_shapes)}
    names = [f"a{index:04}" for index in range(count)]
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").write_text(json.dumps(adapter_config))
        weights = {}
        for layer in range(config.layers):
            for target, (d_out, d_in) in config.target_shapes.items():
                block = "self_attn" if target in ATTENTION else "mlp"
                stem = f"base_model.model.{config.prefix}layers.{layer}.{block}.{target}"
                for factor, shape in (("A", (rank, d_in)), ("B", (d_out, rank))):
                    drawn = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
                    weights[f"{stem}.lora_{factor}.weight"] = drawn
        save_file(weights, root / name / "adapter_model.safetensors")
    return names


def draw_names(kind: str, names: Sequence[str], count: int) -> list[str]:
    """Return the adapter of each of `count` requests.

    kind: "zipf" (most requests are for few adapters), "uniform" or "churning" (a working set of
        CHURN_SET adapters, of which some are replaced regularly).
    """
    rng = random.Random(kind)
    if kind == "zipf":
        weights = [1 / (rank + 1) ** ZIPF_EXPONENT for rank in range(len(names))]
        return rng.choices(names, weights, k=count)
    if kind == "uniform":
        return rng.choices(names, k=count)
    return [
        names[(i // CHURN_INTERVAL * CHURN_SHIFT + rng.randrange(CHURN_SET)) % len(names)]
        for i in range(count)
    ]

"""Writing of a large LLaVA-1.5 checkpoint with random weights, one shard at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
SHARD_BYTES = 1 << 30
DEVIATION = 0.02
"""Standard deviation of the weights, as transformers initializes them."""


def configuration(layers: int) -> LlavaConfig:
    """Return the configuration of LLaVA-1.5-7B with `layers` decoder layers."""
    text = LlamaConfig(
        vocab_size=32064,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    return LlavaConfig(text_config=text, vision_config=vision, image_seq_length=576)


def make(folder: Path, config: LlavaConfig, report: Callable[[str], None]) -> None:
    """Write a checkpoint of bfloat16 weights with the demo's tokenizer into a folder.

    Shards are written one after another, so that only one is in memory.

    report: called with a line after each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.bos_token_id = tokenizer.bos_token_id
    config.text_config.eos_token_id = tokenizer.eos_token_id
    config.architectures = ["LlavaForConditionalGeneration"]
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    torch.manual_seed(0)
    files: dict[str, str] = {}
    shards = list(_shards(shapes))
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        weights = {name: _drawn(shapes[name]) for name in names}
        if "lm_head.weight" in weights:
            # A logit of 0 is never the largest, so answers have only tokens of the tokenizer.
            weights["lm_head.weight"][len(tokenizer) :] = 0.0
        save_file(weights, folder / file, {"format": "pt"})
        files |= dict.fromkeys(names, file)
        report(f"{file} ({i} of {len(shards)})")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = config.vision_config.image_size
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=size).save_pretrained(folder)


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yield the names of each shard's weights. A shard has at most SHARD_BYTES, or one weight."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        more = 2 * int(torch.Size(shape).numel())
        if names and size + more > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names


def _drawn(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random weights: around 1 for norms and other vectors, around 0 for matrices."""
    mean = 1.0 if len(shape) == 1 else 0.0
    return torch.empty(shape, dtype=torch.bfloat16).normal_(mean, DEVIATION)

"""Parity of every supported decoder with that of transformers, on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.logits import logits_gap, save_decoder

TRAINED = 32
"""Original number of positions of the scaled rotary embeddings; one prompt is longer."""
TOLERANCE = 3e-4

BASE = {"rope_theta": 1e4}
LINEAR = BASE | {"rope_type": "linear", "factor": 4.0}
LLAMA3 = BASE | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = BASE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
DECODERS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-heads": (LlamaConfig, {"head_dim": 20, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 12}),
    "mistral-yarn": (MistralConfig, {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2": (
        Qwen2Config,
        {"rope_parameters": BASE | {"rope_theta": 1e6}, "tie_word_embeddings": True},
    ),
    "qwen2-yarn": (Qwen2Config, {"rope_parameters": YARN}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "qwen3-biased": (Qwen3Config, {"head_dim": 20, "attention_bias": True}),
    "rope-linear": (LlamaConfig, {"rope_parameters": LINEAR}),
    "rope-llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "rope-yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "rope-yarn-attention": (
        LlamaConfig,
        {"rope_parameters": YARN | {"attention_factor": 1.7, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "rope-yarn-mscale": (
        LlamaConfig,
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
}


def save(name: str, checkpoint: Path, folder: Path) -> PreTrainedModel:
    kind, options = DECODERS[name]
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    return save_decoder(checkpoint, folder, kind, **sizes, **heads, **options)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_equals_that_of_transformers(name: str, checkpoint: Path, tmp_path: Path) -> None:
    model = save(name, checkpoint, tmp_path)
    assert logits_gap(model, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("name", ["rope-linear", "rope-llama3", "rope-yarn"])
def test_a_decoder_without_its_rope_scaling_differs(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = save(name, checkpoint, tmp_path)
    path = tmp_path / "config.json"
    plain = {"rope_parameters": BASE | {"rope_type": "default"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | plain))
    assert logits_gap(model, tmp_path) > 100 * TOLERANCE

"""Parity of every supported decoder with that of transformers, on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.oracle import NEAR_TIE
from tests.support.questions import WORDS
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import Request
from vlora.sampling import SamplingParams

TRAINED = 32
"""Original number of positions of the scaled rotary embeddings; prompts are longer."""

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
    """Save a random decoder with the demo's tokenizer, and return it."""
    kind, options = DECODERS[name]
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    config = kind(
        vocab_size=len(tokenizer),
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=4 * TRAINED,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def max_logit_gap(model: PreTrainedModel, folder: Path) -> float:
    """Return the maximum gap between transformers' best logit and that of the engine's token.

    The engine answers eight prompts longer than TRAINED in one batch; transformers is
    teacher-forced with its tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = Engine(Options(model=folder))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    rng = np.random.default_rng(0)
    prompts = {f"q{i}": " ".join(["<s>", *rng.choice(WORDS, TRAINED)]) for i in range(8)}
    for request_id, prompt in prompts.items():
        engine.add(engine.prepare(Request(request_id, prompt, params)), arrival=0.0)
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    while not engine.idle:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    gap = 0.0
    for request_id, tokens in answers.items():
        ids = tokenizer(prompts[request_id], add_special_tokens=False)["input_ids"]
        assert len(ids) >= TRAINED
        with torch.inference_mode():
            logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        for row, token in zip(logits, tokens, strict=True):
            gap = max(gap, float(row.max() - row[token]))
    return gap


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_equals_that_of_transformers(name: str, checkpoint: Path, tmp_path: Path) -> None:
    model = save(name, checkpoint, tmp_path)
    assert max_logit_gap(model, tmp_path) <= NEAR_TIE


@pytest.mark.parametrize("name", ["rope-linear", "rope-llama3", "rope-yarn"])
def test_a_decoder_without_its_rope_scaling_differs(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = save(name, checkpoint, tmp_path)
    path = tmp_path / "config.json"
    plain = {"rope_parameters": BASE | {"rope_type": "default"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | plain))
    assert max_logit_gap(model, tmp_path) > 100 * NEAR_TIE

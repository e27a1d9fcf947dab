"""A small random Llama decoder, and the comparison of its logits with those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.support.questions import WORDS
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.runner import Runner, StepResult
from vlora.request import Request
from vlora.sampling import SamplingParams


def save_decoder(checkpoint: Path, folder: Path, **options: Any) -> LlamaForCausalLM:
    """Save a random decoder with the demo's tokenizer, and return it.

    options: keys of its configuration that differ from the defaults here.
    """
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "attention_bias": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(**sizes | options)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    return model


def logits_gap(model: PreTrainedModel, folder: Path, **options: Any) -> float:
    """Return the largest difference between the engine's logits and those of transformers.

    Prompts of many lengths are prefilled together, then decoded.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = Engine(Options(model=folder, **options))
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [" ".join(["<s>", *rng.choice(WORDS, length)]) for length in (1, 5, 9, 60)]
    rows: list[torch.Tensor] = []
    forward = Runner.forward

    def recorded(self: Runner, *args: Any) -> StepResult:
        result = forward(self, *args)
        rows.append(result.logits.clone())
        return result

    gap = 0.0
    for index, prompt in enumerate(prompts):
        rows.clear()
        engine.add(engine.prepare(Request(f"q{index}", prompt, params)), arrival=0.0)
        tokens: list[int] = []
        with patch.object(Runner, "forward", recorded):
            while not engine.idle:
                for output in engine.step():
                    tokens += output.token_ids
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            expected = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        gap = max(gap, float((torch.cat(rows) - expected).abs().max()))
    return gap

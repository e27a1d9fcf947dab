"""Logits of the engine and of transformers, after prompts with one image each or with text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
)

from benchmarks import llava
from tests.support.modes import drive
from tests.support.questions import WORDS
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.runner import Runner, StepResult
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
from vlora.vision.encoder import VisionEncoder
from vlora.vision.images import DecodedImage

SMALL = llava.Sizes(
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=2,
    inner=704,
    vocabulary=2048,
    tower_layers=2,
    tower_hidden=64,
    tower_heads=2,
    tower_inner=128,
    image=56,
    adapters=3,
    ranks=(8, 64, 16),
)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def questions(count: int, seed: int, side: int = SMALL.image) -> tuple[list[str], list[Any]]:
    """Return prompts with one image each, and their images, which are squares of `side` pixels."""
    rng = np.random.default_rng(seed)
    images = [
        DecodedImage(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(count)
    ]
    return [f"<image> {llava.prompt(8 + index, index, SMALL)}" for index in range(count)], images


@contextmanager
def recorded_logits() -> Iterator[list[torch.Tensor]]:
    """Yield the list to which the logits of each step are appended, [rows, V]."""
    rows: list[torch.Tensor] = []
    forward = Runner.forward

    def recorded(self: Runner, *args: Any) -> StepResult:
        result = forward(self, *args)
        rows.append(result.logits.clone())
        return result

    with patch.object(Runner, "forward", recorded):
        yield rows


def engine_logits(
    folder: Path,
    dtype: str,
    prompts: Sequence[str],
    images: Sequence[Any],
    adapters: Path | None = None,
    names: Sequence[str | None] = (),
    live: str | None = None,
    quantization: str | None = None,
) -> torch.Tensor:
    """Return the engine's logits after each prompt with its image, [prompts, V].

    names: adapter of each prompt; empty for the base model. live: adapter merged into the weights.
    """
    encoder = VisionEncoder(folder, 1, TYPES[dtype])
    engine = Engine(
        Options(model=folder, adapters=adapters, dtype=dtype, quantization=quantization)
    )
    slot = engine.adapters.slot(live)
    drive(engine, lambda _: slot)
    with recorded_logits() as rows:
        for index, (text, image, name) in enumerate(
            zip(prompts, images, names or [None] * len(prompts), strict=True)
        ):
            (features,) = encoder.encode([image])
            layout = np.array([[0, len(features), 1, *encoder.grid(image), 0]], dtype=np.int32)
            params = SamplingParams(temperature=0.0, max_tokens=1)
            encoded = ImageFeatures(features, layout)
            request = Request(f"types-{index}", text, params, adapter=name, images=encoded)
            engine.add(engine.prepare(request), 0.0)
            while not engine.idle:
                engine.step()
    return torch.cat(rows)


@torch.inference_mode()
def stock_logits(
    folder: Path,
    dtype: str,
    prompts: Sequence[str],
    images: Sequence[Any],
    adapter: Path | None = None,
    *,
    merged: bool = False,
) -> torch.Tensor:
    """Return the same logits from transformers and PEFT, computed in `dtype`.

    merged: whether the adapter is merged by merge_and_unload.
    """
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=TYPES[dtype]).eval()
    if adapter is not None:
        peft = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
        peft = peft.to(TYPES[dtype]).eval()
        model = peft.merge_and_unload() if merged else peft.get_base_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = VisionEncoder(folder, 1)
    rows = []
    for text, image in zip(prompts, images, strict=True):
        ids: list[int] = []
        for token in tokenizer(text)["input_ids"]:
            is_image = token == model.config.image_token_id
            ids.extend([token] * (model.config.image_seq_length if is_image else 1))
        pixels = encoder.preprocess(image)["pixel_values"].to(TYPES[dtype])
        logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits
        rows.append(logits[0, -1:].float())
    return torch.cat(rows)


def save_decoder(
    checkpoint: Path, folder: Path, kind: type[PretrainedConfig] = LlamaConfig, **options: Any
) -> PreTrainedModel:
    """Save a random decoder with the tokenizer of `checkpoint`, and return it.

    options: of its config, in addition to small sizes or in place of them.
    """
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = kind(vocab_size=len(tokenizer), **sizes | tokens | options)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert isinstance(model, PreTrainedModel)
    return model


def logits_gap(model: PreTrainedModel, folder: Path, **options: Any) -> float:
    """Return the largest difference between the engine's logits and those of transformers, which is
    teacher-forced with the engine's tokens.

    Prompts of many lengths are prefilled one after another, then decoded.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = Engine(Options(model=folder, **options))
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    gap = 0.0
    with recorded_logits() as rows:
        for length in (1, 5, 9, 60):
            rows.clear()
            prompt = " ".join(["<s>", *rng.choice(WORDS, length)])
            engine.add(engine.prepare(Request(f"q{length}", prompt, params)), arrival=0.0)
            tokens: list[int] = []
            while not engine.idle:
                tokens += [token for output in engine.step() for token in output.token_ids]
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            with torch.inference_mode():
                expected = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
            gap = max(gap, float((torch.cat(rows) - expected).abs().max()))
    return gap

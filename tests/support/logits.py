"""Logits of the engine and of transformers after prompts with one image each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from benchmarks import llava
from tests.support.modes import drive
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.runner import Runner, StepResult
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
from vlora.vision.encoder import VisionEncoder

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
    rows: list[torch.Tensor] = []
    forward = Runner.forward

    def recorded(self: Runner, *args: Any) -> StepResult:
        result = forward(self, *args)
        rows.append(result.logits.clone())
        return result

    with patch.object(Runner, "forward", recorded):
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

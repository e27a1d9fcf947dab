"""The load of `vlora bench engine` on transformers + PEFT: one batch, an adapter a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.engine.load import OUTPUT, Ask, Run
from benchmarks.llava import Checkpoint
from vlora.vision.encoder import PROCESSOR_BACKEND

BASE = "__base__"
"""PEFT's name for rows without an adapter."""


class PeftMixed:
    """The stock model with every adapter attached, as PEFT's mixed batches want it."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        from peft import PeftModel
        from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

        folder = checkpoint.folder
        self._dtype = dtype
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend=PROCESSOR_BACKEND)
        self._base = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        self._base.generation_config.eos_token_id = None
        names = checkpoint.adapter_names
        self._model = PeftModel.from_pretrained(
            self._base,
            checkpoint.adapters / names[0],
            adapter_name=names[0],
            autocast_adapter_dtype=False,
        )
        for name in names[1:]:
            self._model.load_adapter(
                checkpoint.adapters / name, adapter_name=name, autocast_adapter_dtype=False
            )
        self._model.to(dtype).eval()

    @torch.inference_mode()
    def run(self, asks: Sequence[Ask]) -> Run:
        started = time.perf_counter()
        first: list[float] = []
        given: dict[str, Any] = {}
        places = ""
        if asks[0].image is not None:
            pixels = self._processor(images=[ask.image for ask in asks], return_tensors="pt")
            given["pixel_values"] = pixels["pixel_values"].to(self._dtype)
            places = "<image>" * self._base.config.image_seq_length
        ids = self._tokenizer([places + ask.prompt for ask in asks], return_tensors="pt")

        def noted(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            first.append(time.perf_counter() - started)
            return scores

        self._model.generate(
            input_ids=ids["input_ids"],
            attention_mask=ids["attention_mask"],
            **given,
            adapter_names=[ask.adapter or BASE for ask in asks],
            do_sample=False,
            min_new_tokens=OUTPUT,
            max_new_tokens=OUTPUT,
            logits_processor=[noted],
        )
        wall = time.perf_counter() - started
        return Run([first[0]] * len(asks), [wall] * len(asks))

"""One load of the engine benchmark on transformers and PEFT: one batch, one adapter per row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.engine.load import OUTPUT, LoadRequest, LoadTimes
from benchmarks.llava import Checkpoint
from vlora.vision.families.base import PROCESSOR_BACKEND

BASE = "__base__"
"""PEFT's name for rows without an adapter."""


class PeftMixed:
    """The unchanged model with every adapter attached, as PEFT's mixed batches require."""

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
    def run(self, requests: Sequence[LoadRequest]) -> LoadTimes:
        """Generate all answers in one batch, and return the times of their tokens."""
        started = time.perf_counter()
        token_times: list[float] = []
        inputs: dict[str, Any] = {}
        placeholders = ""
        if requests[0].image is not None:
            images = [request.image for request in requests]
            pixels = self._processor(images=images, return_tensors="pt")
            inputs["pixel_values"] = pixels["pixel_values"].to(self._dtype)
            placeholders = "<image>" * self._base.config.image_seq_length
        texts = [placeholders + request.prompt for request in requests]
        ids = self._tokenizer(texts, return_tensors="pt")

        def record_time(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            token_times.append(time.perf_counter() - started)
            return scores

        self._model.generate(
            input_ids=ids["input_ids"],
            attention_mask=ids["attention_mask"],
            **inputs,
            adapter_names=[request.adapter or BASE for request in requests],
            do_sample=False,
            min_new_tokens=OUTPUT,
            max_new_tokens=OUTPUT,
            logits_processor=[record_time],
        )
        wall = time.perf_counter() - started
        return LoadTimes([token_times[0]] * len(requests), [wall] * len(requests))

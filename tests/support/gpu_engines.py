"""Requests and logits by which engines on a GPU and on the CPU are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.engine_client import answers
from tests.support.modes import drive
from vlora.engine.engine import Engine
from vlora.ids import BASE
from vlora.model.runner import StepResult
from vlora.request import Request
from vlora.sampling import SamplingParams

PARAMS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.8, "seed": 2},
    {"temperature": 1.5, "top_k": 20, "min_p": 0.01, "seed": 4},
    {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.4, "logprobs": 1},
)


def every_request(engine: Engine) -> list[Request]:
    """Return requests of the base model and of adapters, one for each entry of PARAMS."""
    names = (None, *engine.adapters.names()[:2])
    return [
        Request(
            id=f"r{index}",
            prompt=f"<s>what is {'on the left of it ' * index}?",
            sampling=SamplingParams.parse({"max_tokens": 4, "ignore_eos": True, **params}),
            adapter=names[index % len(names)],
        )
        for index, params in enumerate(PARAMS)
    ]


def logits_of_fixed_tokens(engine: Engine) -> list[torch.Tensor]:
    """Return the logits of prompts and decoding rows, of the base model and of adapters.

    Every second step has an adapter merged.
    """
    logits: list[torch.Tensor] = []
    forward = engine._runner.forward

    def recorded(*arguments: Any) -> StepResult:
        result = forward(*arguments)
        logits.append(result.logits.clone())
        # All runs follow the same tokens, however close two logits are.
        fixed = torch.zeros_like(result.logits)
        fixed[:, 7] = 1.0
        return replace(result, logits=fixed)

    engine._runner.forward = recorded  # type: ignore[method-assign]
    live = engine.adapters.slot("attention-r4")
    drive(engine, lambda step: live if step % 2 else BASE)
    for name in (None, "all-r8", "attention-r4"):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        answers(engine, [Request("r", "<s>what is it?", params, adapter=name)])
    return logits

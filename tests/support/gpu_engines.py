"""Options, requests, answers and logits by which engines on a GPU and on the CPU are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.engine_client import Collector, answers
from tests.support.fake_device import FakeDevice, fake_gpu
from tests.support.modes import drive
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.loop import EngineLoop
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


PATIENCE = 600.0
"""Maximum time in seconds of a request: interpreted kernels are slow, also on a busy machine."""


def small_options(checkpoint: Path, adapters: Path, **changes: Any) -> Options:
    """Return options of an engine with small steps and pages.

    changes: options with other values.
    """
    torch.set_num_threads(1)
    options = Options(
        model=checkpoint,
        adapters=adapters,
        max_num_seqs=4,
        max_num_batched_tokens=17,
        block_size=8,
        kv_cache_tokens=1024,
    )
    return replace(options, **changes)


def on_both(options: Options, run: Callable[[Engine], object]) -> tuple[Engine, FakeDevice, object]:
    """Check that `run` gives the same on the CPU and on a fake GPU. Return the fake GPU's engine,
    that device, and the result."""
    on_cpu = Engine(options)
    expected = run(on_cpu)
    on_cpu.close()
    with fake_gpu() as device:
        engine = Engine(options)
        assert run(engine) == expected
        engine.close()
    return engine, device, expected


def answers_of_loop(engine: Engine, batch: Sequence[Request]) -> dict[str, list[int]]:
    """Run requests on the thread of an engine loop. Return the tokens of each by request id."""
    loop, sink = EngineLoop(engine, max_waiting=10), Collector()
    try:
        for item in batch:
            loop.submit(item, sink)
        for item in batch:
            sink.last(item.id, PATIENCE)
    finally:
        loop.shutdown(0)
    return {item.id: sink.tokens(item.id) for item in batch}


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

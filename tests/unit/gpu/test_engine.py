"""Tests that an engine on a fake GPU, with interpreted GPU kernels, gives the CPU's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.count_launches import recorded_launches
from tests.support.engine_client import answers
from tests.support.fake_device import fake_gpu
from tests.support.gpu_engines import (
    PARAMS,
    every_request,
    logits_of_fixed_tokens,
    small_options,
)
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.decoder import DecoderLayer
from vlora.request import Request
from vlora.sampling import SamplingParams


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("policy", ["unmerge_only", "paper"])
def test_answers_equal_those_of_the_cpu(
    checkpoint: Path, adapters_dir: Path, request: pytest.FixtureRequest, policy: str
) -> None:
    # A prompt is cut into chunks, pages are partly filled, and rows of both kinds share a step.
    options = small_options(checkpoint, adapters_dir, policy=policy)
    on_cpu = Engine(options)
    expected = answers(on_cpu, every_request(on_cpu))
    request.getfixturevalue("cuda_operator")
    with fake_gpu() as device:
        engine = Engine(options)
        assert answers(engine, every_request(engine)) == expected
    # The inputs of a step cross in one copy, and its tokens come back in one.
    assert device.events == ["upload", "read", "wait"] * engine.stats().steps
    assert engine.stats().graphs_replayed > 0
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(PARAMS)


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_an_engine_in_float16_computes_the_cpus_logits_within_rounding(
    checkpoint: Path, adapters_dir: Path, request: pytest.FixtureRequest
) -> None:
    """Compute prompts and decoding rows of the base model, an adapter and a merged adapter."""
    options = Options(
        model=checkpoint, adapters=adapters_dir, kv_cache_tokens=512, policy="unmerge_only"
    )

    expected = logits_of_fixed_tokens(Engine(options))
    request.getfixturevalue("cuda_operator")
    with fake_gpu() as device:
        engine = Engine(replace(options, dtype="float16"))
        assert engine.slab.base.dtype == engine.memory.kv_cache.cache.dtype == torch.float16
        actual = logits_of_fixed_tokens(engine)
    assert "replay" in device.graph_events
    assert len(actual) == len(expected)
    for half, single in zip(actual, expected, strict=True):
        error = (half - single).abs().max() / single.abs().max()
        assert 0 < error < 2e-2


@pytest.mark.usefixtures("launch", "cuda_operator")
@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_layer_of_a_decoding_step_launches_eight_kernels_and_those_of_adapters(
    checkpoint: Path,
    adapters_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: int,
    adapted: bool,
) -> None:
    monkeypatch.setattr("vlora.model.attention_gpu.splits", lambda *sizes: parts)
    product = ["mm", *["atmm"] * adapted]
    expected = ["add_norm", *product, "decode", *product]
    expected += ["add_norm", *product, "gate", *product]
    layers: list[list[str]] = []

    def recording(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            with recorded_launches() as names:
                result = method(*args)
            layers.append(names)
            return result

        return call

    with fake_gpu() as device:
        engine = Engine(
            Options(
                model=checkpoint, adapters=adapters_dir, kv_cache_tokens=512, policy="unmerge_only"
            )
        )
        prompt = Request(
            id="r",
            prompt="<s>red",
            sampling=SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
            adapter="all-r8" if adapted else None,
        )
        state = engine.prepare(prompt)
        engine.add(state, arrival=0.0)
        while "replay" not in device.graph_events:
            engine.step()
        for method in ("attend", "finish"):
            monkeypatch.setattr(DecoderLayer, method, recording(getattr(DecoderLayer, method)))
        engine.step()
    assert device.graph_events[-1] == "replay"
    assert len(layers) == 2 * engine.config.layers
    for attend, finish in zip(layers[::2], layers[1::2], strict=True):
        assert attend + finish == expected

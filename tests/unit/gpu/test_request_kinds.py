"""Tests that requests of every kind get the CPU's answers on a fake GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.engine_client import answers, request, run_together
from tests.support.gpu_engines import on_both
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.encoder import VisionEncoder
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render

pytestmark = pytest.mark.usefixtures("launch")


@pytest.fixture
def options(checkpoint: Path, adapters_dir: Path) -> Options:
    torch.set_num_threads(1)
    return Options(
        model=checkpoint, adapters=adapters_dir, max_num_seqs=4, block_size=4, kv_cache_tokens=512
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_images_are_read_in_chunks_with_positions_of_three_axes(
    checkpoint: Path, tmp_path: Path, family: str
) -> None:
    """qwen2_vl has biases; qwen3_vl has norms of heads, and features for its first layers."""
    torch.set_num_threads(1)
    model = make_checkpoint(family, checkpoint, tmp_path / "model")
    rng = np.random.default_rng(1)
    images = [DecodedImage(rng.integers(0, 256, (40, size, 3), np.uint8)) for size in (30, 60)]
    service = EncoderService(VisionEncoder(model, 1), FeatureCache(1 << 24))
    (encoded,) = service.run([images])
    features = ImageFeatures(encoded.features, encoded.layout)
    template = ChatTemplate.from_checkpoint(model)
    prompt = render("vqa", "<image> or <image>?", 2, 0, template)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def run(engine: Engine) -> object:
        return answers(
            engine,
            [
                Request("image", prompt, params, images=features),
                Request("text", "<s>what is it?", params),
            ],
        )

    options = Options(
        model=model, max_num_seqs=2, max_num_batched_tokens=9, block_size=4, kv_cache_tokens=512
    )
    engine, *_ = on_both(options, run)
    assert engine.stats().graphs_replayed > 0


STRUCTURES: tuple[dict[str, object], ...] = (
    {"structured_outputs": {"regex": "(red|green|blue) (square|circle)"}, "temperature": 0},
    {"structured_outputs": {"regex": "[a-z]{2,6} [a-z]{2,6}"}, "temperature": 1.5, "seed": 3},
    {"structured_outputs": {"choice": ["red", "green"]}, "temperature": 1.0, "seed": 4},
    {"temperature": 0.8, "seed": 5, "logprobs": 2, "repetition_penalty": 1.2},
)


def test_structures_and_penalties_are_applied_on_a_gpu(options: Options) -> None:
    def run(engine: Engine) -> object:
        asked = [
            request(f"r{index}", sampling=SamplingParams.parse({"max_tokens": 8, **keys}))
            for index, keys in enumerate(STRUCTURES)
        ]
        return answers(engine, asked)

    on_both(options, run)


def test_preempted_requests_and_shared_prefixes_continue_on_a_gpu(options: Options) -> None:
    prompts = ("<s>what is on the left of it?", "<s>what is on the left of the dog?", "<s>red")
    small = replace(options, adapters=None, kv_cache_tokens=48)

    def run(engine: Engine) -> object:
        asked = [request(f"r{i}", 12, prompt=prompt) for i, prompt in enumerate(prompts)]
        results = []
        for _ in range(2):
            outputs = run_together(engine, *asked)
            tokens = {
                name: [t for o in each for t in o.token_ids] for name, each in outputs.items()
            }
            results.append((tokens, {n: each[-1].num_cached_tokens for n, each in outputs.items()}))
        return results

    engine, _, results = on_both(small, run)
    assert engine.stats().preemptions > 0
    assert max(results[1][1].values()) > 0  # type: ignore[index]

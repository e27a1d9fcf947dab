"""Parity with transformers and PEFT for adapters of the vision tower and the connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import FAMILIES
from tests.support.families import ADAPTERS, VISION_ADAPTERS, Family
from tests.support.oracle import NEAR_TIE
from vlora.adapters.catalog import FolderFinder
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
from vlora.vision.adapters import VisionAdapters
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render

MAX_TOKENS = 12
NAMES = (None, ADAPTERS[0], *VISION_ADAPTERS)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Family:
    family = Family(request.param, checkpoint, tmp_path_factory.mktemp(request.param))
    family.add_vision_adapters()
    return family


@pytest.fixture(scope="module")
def vision(family: Family) -> Iterator[VisionAdapters]:
    shape = adapter_shape(family.checkpoint, load_config(family.checkpoint))
    layers = family.encoder.layers
    assert shape.vision().keys() == layers.keys()
    adapters = VisionAdapters(shape, FolderFinder(family.adapters, {}), 1 << 30, None, layers)
    yield adapters
    adapters.close()


def test_answers_equal_those_of_the_stock_model(family: Family, vision: VisionAdapters) -> None:
    """All adapters see the same images in one batch; tokens are mixed in each step."""
    rng = np.random.default_rng(3)
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    images = [DecodedImage(rng.integers(0, 256, (*s, 3), np.uint8)) for s in ((40, 24), (16, 60))]
    prompt = render("vqa", "<image> and <image>?", 2, 0, template)
    parts = [vision.part(name) for name in NAMES]
    assert [part is None for part in parts] == [True, True, False, False, False]
    before = family.service.counters
    encoded = family.service.run([images] * len(NAMES), parts)
    after = family.service.counters
    assert after.misses - before.misses == 2 * 4  # base and "first" share their features
    engine = Engine(Options(model=family.checkpoint, adapters=family.adapters, block_size=4))
    answers: dict[str, list[int]] = {}
    for name, own in zip(NAMES, encoded, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        features = ImageFeatures(own.features, own.layout, own.adapter_version)
        request = Request(str(name), prompt, params, adapter=name, images=features)
        engine.add(engine.prepare(request), arrival=0.0)
        answers[str(name)] = []
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
    for name in NAMES:
        assert family.gap(prompt, images, name, answers[str(name)]) <= NEAR_TIE, name
    engine.adapters.check_integrity()

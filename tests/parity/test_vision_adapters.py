"""Parity with transformers and PEFT for adapters of the vision tower and the connector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.engine_client import run_questions
from tests.support.families import ADAPTERS, FAMILY_NAMES, VISION_ADAPTERS, OracleFamily
from tests.support.oracle import NEAR_TIE
from vlora.adapters.catalog import FolderFinder
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.model.decoder_config import load_config
from vlora.model.loader import adapter_shape
from vlora.request import ImageFeatures
from vlora.vision.adapters import VisionAdapters
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.images import DecodedImage
from vlora.vision.prompts import render

MAX_TOKENS = 12
NAMES = (None, ADAPTERS[0], *VISION_ADAPTERS)


@pytest.fixture(scope="module")
def vision(family: OracleFamily) -> Iterator[VisionAdapters]:
    family.add_vision_adapters()
    shape = adapter_shape(family.checkpoint, load_config(family.checkpoint))
    layers = family.encoder.layers
    assert shape.vision().keys() == layers.keys()
    adapters = VisionAdapters(shape, FolderFinder(family.adapters, {}), 1 << 30, None, layers)
    yield adapters
    adapters.close()


@pytest.mark.parametrize("family", FAMILY_NAMES, indirect=True)
def test_answers_equal_those_of_the_oracle(family: OracleFamily, vision: VisionAdapters) -> None:
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
    asked = [(prompt, images, name) for name in NAMES]
    features = [ImageFeatures(own.features, own.layout, own.adapter_version) for own in encoded]
    answers, _ = run_questions(engine, asked, features, MAX_TOKENS)
    for number, name in enumerate(NAMES):
        assert family.gap(prompt, images, name, answers[str(number)]) <= NEAR_TIE, name
    assert len(set(map(tuple, answers.values()))) > 1, "the adapters change nothing"
    engine.adapters.check_integrity()
